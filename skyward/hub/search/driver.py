"""Driver of a sweep: it keeps as many trials running as there is room for, and answers their reports.

All that it knows is in the hub. So when it dies, the next driver goes on: trials that ran begin again with the same
parameters, number and run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, Protocol

from optuna.exceptions import UpdateFinishedTrialError

from ...errors import HubError, NodeError, PoolClosed, UsageError
from ...wire.task_channel import TaskChannel, services
from ..client.active import ActiveRun, RunSpec, error_text, user_name
from ..client.connection import path_of
from ..client.repeated import RepeatedRequests
from ..client.trial import CHANNEL, PREEMPTED, SAVE, TrialReturn, TrialTask
from ..model.product import PREFIX
from ..model.sweep_config import SweepConfig
from .plans import STOPPED, PlaceLost, TrialEnd, TrialPlan, TrialSearch

LEASE_S = 6.0
"""Seconds after which a driver that is not heard of is replaced."""
_RENEW_S = 1.0
STOP_S = 30.0
"""Seconds that a trial of a stopped sweep has until its next report, before its call is cancelled."""
_LOST = "lost"
_REPLACED = "another program drives the sweep now"

_log = logging.getLogger(__name__)


class TrialPlace(Protocol):
    """Where trials run."""

    def start(self, task: TrialTask) -> Future[Any]:
        """Start a trial. The value of the future is a `TrialReturn`, or the list of one and None for each rank."""
        ...

    def leave(self, future: Future[Any]) -> None:
        """Give up a trial that runs, because its driver ends before the sweep does."""
        ...


class SweepInterrupted(Exception):
    """The driver ended before its sweep did: its pool was closed, or another program drives the sweep."""


class SweepDriver:
    """Driver of one sweep in this process.

    Args:
        requests: Requests to the hub.
        row: The sweep, as `/v1/hpo` shows it.
        config: Its configuration.
        search: Makes its way to choose parameters, whose new trials carry the fence of the driver's lease.
        place: Where trials run.
        room: Trials that run there at once.
        spool: Folder for the sweep's run.
        root: Folder or URL of the trials' folders; None without one.
    """

    def __init__(
        self,
        requests: RepeatedRequests,
        row: Mapping[str, Any],
        config: SweepConfig,
        search: Callable[[int], TrialSearch],
        place: TrialPlace,
        *,
        room: int,
        spool: Path,
        root: str | None = None,
    ) -> None:
        self._requests, self._row, self._config = requests, row, config
        self._begin_search, self._place, self._root = search, place, root
        self._room = min(room, config.max_concurrent_trials or 8)
        self._name = f"{os.getpid()}-{uuid.uuid4().hex[:16]}"
        self._path = path_of("v1", "hpo", str(row["id"]))
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[TrialPlan] = deque()
        self._running: dict[str, tuple[TrialPlan, Future[Any]]] = {}
        self._spool = spool
        self._losses: dict[int, int] = {}
        self._stopping_since: float | None = None
        self._makes_way = False
        self._renewed_at = time.monotonic()
        self._fence: int | None = None
        self._failure: BaseException | None = None
        self._is_over = threading.Event()

    def run(self) -> str:
        """Drive the sweep to its end, and return it: "completed" or "stopped".

        Raises:
            SweepInterrupted: The pool was closed, or another program drives the sweep now.
            UsageError: Another program drives it.
            HubError: The hub is away for too long.
        """
        fence = self._take_lease()
        self._run = self._open_run()
        renewer = threading.Thread(target=self._renew, name="skyward-sweep-lease", daemon=True)
        renewer.start()
        services.setdefault(CHANNEL, serve)
        state, error = None, None
        try:
            self._search = self._begin_search(fence)
            self._waiting.extend(self._search.unfinished())
            self._drive()
            state = "completed" if self._stopping_since is None else "stopped"
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._is_over.set()
            self._let_go()
            renewer.join()
            self._end(state, error)
        return state

    def make_way(self) -> None:
        """Let the running trials save and stop, and begin no others. `run` then raises SweepInterrupted.

        The trials stay as they are in the hub, so the next driver lets them go on. Any thread may call it.
        """
        self._makes_way = True
        self._events.put(lambda: self._order(PREEMPTED))

    def leave(self) -> None:
        """End without waiting for the running trials. `run` then raises SweepInterrupted. Any thread may call it."""
        self._fail(SweepInterrupted("it leaves its trials to the next driver"))

    def save(self) -> None:
        """Let the running trials save and go on. Any thread may call it."""
        self._events.put(lambda: self._order(SAVE))

    def _order(self, order: str) -> None:
        for token in self._running:
            _served[token].order(order)

    # Loop -------------------------------------------------------------------------------------------------------------

    def _drive(self) -> None:
        ends_at = None if self._config.timeout_s is None else time.monotonic() + self._config.timeout_s
        while True:
            if ends_at is not None and time.monotonic() > ends_at:
                self._stop()
            self._fill()
            if not self._running:
                if self._makes_way:
                    raise SweepInterrupted("its trials have made way, and go on later")
                return
            self._enforce_stop()
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=_RENEW_S)()
            if self._failure is not None:
                raise self._failure

    def _fill(self) -> None:
        """Start trials while there is room and the search has some."""
        while len(self._running) < self._room and self._stopping_since is None and not self._makes_way:
            self._check_lease()
            plan = self._next_plan()
            if plan is None:
                return
            self._start(plan)

    def _next_plan(self) -> TrialPlan | None:
        with self._searching() as search:
            return self._waiting.popleft() if self._waiting else search.ask()

    @contextlib.contextmanager
    def _searching(self) -> Iterator[TrialSearch]:
        """Lend the search. The hub may refuse a change of it because another driver has gone on meanwhile."""
        try:
            with self._lock:
                yield self._search
        except (HubError, UpdateFinishedTrialError) as error:
            if (isinstance(error, HubError) and error.retryable) or self._hold():  # the hub is away, or refused us
                raise
            raise SweepInterrupted(_REPLACED) from None

    def _start(self, plan: TrialPlan) -> None:
        token = uuid.uuid4().hex
        plan.stopped_by = ""
        with self._lock:
            _served[token] = _Listener(lambda step, value: self._report(plan, step, value))
        future = self._place.start(self._task(plan, token))
        self._running[token] = plan, future
        future.add_done_callback(lambda done: self._events.put(lambda: self._finish(token, done)))

    def _task(self, plan: TrialPlan, token: str) -> TrialTask:
        root = None if self._root is None else self._root.rstrip("/")
        return TrialTask(
            token=token,
            sweep=self._row["name"],
            trial=plan.id,
            number=plan.number,
            attempt=plan.attempt,
            params={**self._config.base_config, **plan.params},
            metrics=[goal.metric for goal in self._config.objective],
            run=plan.run,
            parent_run=self._run.id,
            experiment=self._config.experiment,
            folder=None if root is None else f"{root}/{plan.folder}",
            load_from=None if root is None or plan.load_from is None else f"{root}/{plan.load_from}",
            steps=plan.steps,
            obsolete=[] if root is None else [f"{root}/{name}" for name in plan.obsolete],
            save_stopped=self._config.save_stopped,
        )

    def _finish(self, token: str, future: Future[Any]) -> None:
        """Take the end of a call: the end of its trial, or a loss after which it begins again."""
        plan, _ = self._running.pop(token)
        _served.pop(token, None)
        self._check_lease()
        end = self._end_of(plan, future)
        if end is None:
            return
        with self._searching() as search:
            search.finish(plan, end)
        if end.values is not None and not end.stopped_by:
            metrics = dict(zip((goal.metric for goal in self._config.objective), end.values, strict=True))
            self._run.log_metrics(metrics, step=plan.number)

    def _end_of(self, plan: TrialPlan, future: Future[Any]) -> TrialEnd | None:
        """Return the end of a trial; None if it goes on later."""
        try:
            returned = _first(future.result())
        except (PoolClosed, CancelledError) as error:
            if self._stopping_since is None:
                raise SweepInterrupted(f"the pool was closed while a trial ran ({error})") from error
            return TrialEnd(stopped_by=STOPPED)
        except PlaceLost as lost:
            raise lost.error from None
        except Exception as error:
            if self._makes_way:  # perhaps only because it was stopped; otherwise it fails again
                _log.warning("sweep %s: trial %d made way and raised %r", self._row["name"], plan.number, error)
                return None
            if isinstance(error, NodeError) and self._begin_again(plan, error):
                return None
            return TrialEnd(error=error_text(error), stopped_by="" if isinstance(error, NodeError) else plan.stopped_by)
        is_lost = returned.stopped_by == _LOST and self._begin_again(plan, None)
        if is_lost or returned.stopped_by == PREEMPTED:
            return None
        return TrialEnd(values=returned.values, stopped_by=returned.stopped_by, reports=returned.reports)

    def _begin_again(self, plan: TrialPlan, error: BaseException | None) -> bool:
        """Let a trial begin again whose node was lost. Return False if that happened too often."""
        losses = self._losses[plan.id] = self._losses.get(plan.id, 0) + 1
        if losses > self._config.trial_retries or self._stopping_since is not None:
            return False
        _log.warning("sweep %s: trial %d begins again (%s)", self._row["name"], plan.number, error or "link lost")
        plan.attempt += 1
        self._waiting.appendleft(plan)
        return True

    # Reports ----------------------------------------------------------------------------------------------------------

    def _report(self, plan: TrialPlan, step: int, value: float) -> str:
        """Answer a report, in the thread of the trial's channel."""
        try:
            with self._searching() as search:
                self._check_lease()
                reason = search.report(plan, step, value)
        except BaseException as error:
            self._fail(error)
            raise
        if self._stopping_since is not None:
            reason = reason or STOPPED
        plan.stopped_by = plan.stopped_by or reason
        return plan.stopped_by

    # Stop -------------------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        if self._stopping_since is None:
            _log.info("sweep %s: stops", self._row["name"])
            self._stopping_since = time.monotonic()
            self._events.put(lambda: None)

    def _enforce_stop(self) -> None:
        """Cancel the calls of a stopped sweep that do not report."""
        if self._stopping_since is not None and time.monotonic() - self._stopping_since > STOP_S:
            for _, future in list(self._running.values()):
                future.cancel()

    def _let_go(self) -> None:
        """Leave the trials that still run: the sweep goes on elsewhere or later, and they with it."""
        for token, (_, future) in list(self._running.items()):
            _served.pop(token, None)
            self._place.leave(future)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._events.put(lambda: None)

    # Lease ------------------------------------------------------------------------------------------------------------

    def _take_lease(self) -> int:
        """Wait for the lease of a driver that may be dead; one that lives keeps it. Return its fence."""
        ends_at = time.monotonic() + LEASE_S + 2 * _RENEW_S
        while not self._hold() or self._fence is None:
            if time.monotonic() > ends_at:
                raise UsageError(
                    f"name={self._row['name']!r}: another program runs this sweep; wait for it, or stop it",
                    field="name",
                )
            time.sleep(_RENEW_S / 2)
        return self._fence

    def _renew(self) -> None:
        while not self._is_over.wait(_RENEW_S):
            try:
                if not self._hold():
                    self._fail(SweepInterrupted(_REPLACED))
                    return
            except Exception as error:  # without the lease the sweep must end, whatever the reason is
                self._fail(error)
                return

    def _hold(self) -> bool:
        asked_at = time.monotonic()
        body = {"driver": self._name, "lasts_ms": int(LEASE_S * 1000)}
        answer = self._requests.send("POST", f"{self._path}/lease", body)
        # Another driver may have come and gone while this one stood still.
        is_held = answer["is_held"] and answer["fence"] == (self._fence or answer["fence"])
        if is_held:
            self._renewed_at, self._fence = asked_at, answer["fence"]
            if answer["is_stopping"]:
                self._stop()
        return bool(is_held)

    def _check_lease(self) -> None:
        """Ask for the lease once more where it may be over: this process may have been stopped, or the hub away."""
        if time.monotonic() - self._renewed_at > LEASE_S - _RENEW_S and not self._hold():
            raise SweepInterrupted(_REPLACED)

    # Run --------------------------------------------------------------------------------------------------------------

    def _open_run(self) -> ActiveRun:
        """Open the run of the sweep, whose children are the runs of its trials. It is not the program's current one."""
        known = self._row["run"]
        spec = RunSpec(
            id=known or uuid.uuid4().hex,
            experiment=self._config.experiment,
            name=self._row["name"],
            user=user_name(),
            tags={f"{PREFIX}.sweep": self._row["name"]},
            is_resumed=known is not None,
        )
        if known is None:
            attrs = {"system_attrs": {"skyward:run": json.dumps(spec.id)}}
            self._requests.send("PATCH", path_of("v1", "sweeps", str(self._row["id"])), attrs)
        run = ActiveRun(spec, spool=self._spool, address=self._requests.address)
        if known is None:
            run.log_params({"strategy": self._config.strategy, "seed": self._config.seed})
        return run

    def _end(self, state: str | None, error: BaseException | None) -> None:
        if state is not None:
            self._run.end({"completed": "completed", "stopped": "cancelled"}[state])
        elif isinstance(error, SweepInterrupted | KeyboardInterrupt):
            self._run.end("cancelled", "interrupted; it goes on when it is started again")
        else:
            self._run.end("failed", None if error is None else error_text(error))
        try:
            body = {"driver": self._name, "lasts_ms": 0, "state": state}
            self._requests.send("POST", f"{self._path}/lease", body)
        except HubError as refused:
            _log.warning("sweep %s: its lease is not given up, and ends by itself: %s", self._row["name"], refused)


class _Listener:
    """Messages of a driver to a running trial: an answer to each report, and orders.

    Args:
        answer: Returns the reason to stop after a report; empty to go on.
    """

    def __init__(self, answer: Callable[[int, float], str]) -> None:
        self.answer = answer
        self._lock = threading.Lock()
        self._channel: TaskChannel | None = None
        self._order = ""

    def order(self, order: str) -> None:
        """Send an order, now or when the trial has begun."""
        with self._lock:
            self._order = order
            self._send()

    def listen(self, channel: TaskChannel) -> None:
        """Answer the reports of the trial, until its channel ends."""
        with self._lock:
            self._channel = channel
            self._send()
        with contextlib.suppress(BrokenPipeError):
            for message in channel:
                report = json.loads(message)
                reason = self.answer(int(report["step"]), float(report["value"]))
                channel.send(json.dumps({"stop": reason}).encode())

    def _send(self) -> None:
        if self._channel is not None and self._order:
            with contextlib.suppress(BrokenPipeError):  # it has ended
                self._channel.send(json.dumps({"order": self._order}).encode())
            self._order = ""


_served: dict[str, _Listener] = {}
"""Token of a running trial -> its listener in the driver."""


def answer_of(token: str) -> Callable[[int, float], str] | None:
    """Return the answer to reports of a trial that runs; None for one that does not."""
    listener = _served.get(token)
    return None if listener is None else listener.answer


def serve(channel: TaskChannel) -> None:
    """Answer the reports of a trial, until its channel ends."""
    listener = _served.get(channel.name.partition("/")[2])
    if listener is not None:
        listener.listen(channel)


def _first(value: Any) -> TrialReturn:
    """Return what rank 0 returned: gangs have lists of nodes and ranks."""
    if isinstance(value, TrialReturn):
        return value
    found = [_first(item) for item in value or () if item is not None]
    if not found:
        raise UsageError("objective: no rank 0 returned; run it as one call, or as one gang")
    return found[0]
