"""One attempt on a pool that is open: its call, the hub's orders meanwhile, its output, and its end."""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...calls.compute import compute
from ...calls.control import CommandState
from ...calls.options import CallOptions
from ...calls.pending import ComputeFunction, PendingCompute
from ...engine.questions import SILENT
from ...errors import (
    BudgetExceeded,
    ControlFailed,
    HubError,
    NodeError,
    PoolClosed,
    ProviderError,
    SkywardError,
    SlotLost,
    UsageError,
)
from ...pool.pool import ComputePool
from ...values.launch import ProcessLaunch
from ...values.machine import LogLine
from ...wire.failures import encode_failure
from ...wire.payloads import pickle_whole
from ..model.items import frame_item
from ..model.jobs import FEEDS, AttemptEnd
from .command import CommandIntegration
from .packed_call import (
    CallFailed,
    run_packed,
    run_packed_command,
    run_packed_operation,
    run_packed_trial_alone,
    stream_packed,
)
from .reporter import FENCE_S, HubLink, Reporter, Stale, until_heard
from .save_notes import NoteCollector
from .sweep_run import JobsSweepRun, SweepRun

OUTPUT_LIMIT = 256 << 20
"""Most bytes of output of an attempt. The rest is dropped, with a line that says so."""
ITEMS_LIMIT = 256 << 20
"""Most bytes of packed items of an attempt, which the hub keeps in its database."""
LAST_WORD_S = 7 * 86_400.0
"""Seconds for which the end of an attempt waits for a hub that is away. Its machines are gone by then."""
SAVE_S = 3600.0
"""Seconds for which a checkpoint that was asked for may take. A later one counts only by the next request."""
NOTE_S = 3.0
"""Seconds for which the note of a save that was asked for may be on its way."""
_SLICE_S = 0.25

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AttemptOutcome:
    """End of an attempt, with the value or the packed exception.

    Attributes:
        value: Value as a node packed it, or a list with that of each node. Only a completed attempt has one.
        may_retry: Whether the job's retries count for this error.
        is_whole: Whether the pool is open and well, so that it may serve another attempt.
    """

    end: AttemptEnd
    error: str = ""
    value: Any = None
    failure: bytes | None = None
    may_retry: bool = True
    is_whole: bool = False


class AttemptRun:
    """Run of one attempt.

    Args:
        folder: The runner's folder, which has the files of this attempt while it runs.
        launch: The launch.
        make_link: Makes a link to the hub with the attempt's token.
        cost_usd: Returns the cost of the pool since its beginning.
        gpus: Returns a sample of the load of the pool's GPUs; empty if none is due.
    """

    def __init__(
        self,
        folder: Path,
        launch: Mapping[str, Any],
        make_link: Callable[[], HubLink],
        cost_usd: Callable[[], float],
        gpus: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
    ) -> None:
        self._folder, self._launch = folder, launch
        self._spec: Mapping[str, Any] = launch["spec"]
        self._output = (folder / "output").open("ab", buffering=0)
        self._is_stream = bool(self._spec.get("is_stream"))  # a hub of the version before knows none
        self._orders: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
        self._pool_cost_usd, self._cost_before = cost_usd, cost_usd()
        self._is_over, self._was_stopped, self._must_end = threading.Event(), threading.Event(), threading.Event()
        self._stop = f"skyward-stop-{launch['job']}-{launch['attempt']}"
        self._saves = f"skyward-saves-{launch['job']}-{launch['attempt']}"
        number = self._spec["sweep"]
        self._sweep = None if number is None else SweepRun(number, self._spec["image"].get("env", {}))
        self.reporter = Reporter(
            make_link,
            folder,
            FEEDS if self._is_stream else FEEDS[:1],
            on_order=lambda command, grace_s: self._orders.put((command, grace_s)),
            on_stale=lambda: self._orders.put(("stale", 0.0)),
            cost_usd=self.cost_usd,
            gpus=gpus,
        )

    def cost_usd(self) -> float:
        """Return the cost of this attempt so far."""
        return self._pool_cost_usd() - self._cost_before

    def abort(self) -> None:
        """End the call, because this machine shuts down: the job goes back to its queue."""
        self._must_end.set()
        self._orders.put(("abort", 0.0))

    def save_before_loss(self, node: int, notice: str) -> None:
        """Let the training save, because the provider will take the machine of a node back. The call goes on.

        It may outlive the machine, as one over slots does. Otherwise the next attempt loses only what came after.
        """
        self._write(f"[skyward] node {node}: its provider takes the machine back ({notice})\n")
        if not self._spec["command"]:  # a command has no other order than to end
            self._orders.put(("save", 0.0))

    def pending(self, launch: ProcessLaunch, call: bytes, env: Mapping[str, str]) -> PendingCompute[Any]:
        """Return the call of a job's function."""
        function: ComputeFunction[..., Any] = compute(stream_packed if self._is_stream else run_packed)
        function.launch = launch
        return replace(function(call, dict(env), self._saves), options=self._options())

    def pending_trial(self, launch: ProcessLaunch, call: bytes, env: Mapping[str, str]) -> PendingCompute[bytes]:
        """Return the call of a trial that has a job of its own."""
        function = compute(run_packed_trial_alone)
        function.launch = launch
        return replace(
            function(call, dict(env), dict(self._spec["trial"]["task"]), self._saves), options=self._options()
        )

    def pending_operation(self, env: Mapping[str, str]) -> PendingCompute[bytes]:
        """Return the call of a named operation."""
        pending = compute(run_packed_operation)(
            self._spec["operation"], dict(self._spec["params"]), dict(env), self._saves
        )
        return replace(pending, options=self._options())

    def pending_command(self, env: Mapping[str, str]) -> PendingCompute[bytes]:
        """Return the call that runs a command: a gang, whose ranks have torchrun's variables."""
        function = compute(run_packed_command)
        ranks = self._spec["ranks_per_node"]
        function.launch = ProcessLaunch(integrations=(CommandIntegration(processes_per_node=ranks),))
        pending = function(list(self._spec["command"]), self._stop, dict(env), self._saves)
        return replace(pending, options=self._options())

    def _options(self) -> CallOptions:
        # Errors of the pool name the job, and not the function of skyward that carries it.
        return CallOptions(timeout_s=self._spec["timeout_s"], name=self._launch["name"])

    def open(self, pool: ComputePool) -> AttemptOutcome | None:
        """Open the pool, and obey the hub meanwhile: machines may wait in a queue of their provider for hours.

        Returns:
            The end of the attempt if the hub ended it before its machines were ready.

        Raises:
            Stale: The hub has given the attempt up.
            SkywardError: The pool did not open.
        """
        ended_by: list[str] = []
        is_over = threading.Event()

        def obey() -> None:
            while (command := self._next_order()[0]) != "opened":
                if command != "save":  # there is nothing to save yet
                    ended_by.append(command)
                    while not is_over.wait(_SLICE_S):  # a start that has not begun cannot be ended yet
                        pool.close(cancel=True)
                    return

        watcher = threading.Thread(target=obey, name="skyward-job-start", daemon=True)
        watcher.start()
        try:
            pool.start()
        except SkywardError:
            if not ended_by:
                raise
        finally:
            is_over.set()
            self._orders.put(("opened", 0.0))
            watcher.join()
        if ended_by:
            pool.close(cancel=True)  # the order may have come in the moment in which it opened
        if "stale" in ended_by:
            raise Stale("the hub has given it up")
        return AttemptOutcome(end=AttemptEnd.STOPPED, error="the hub stopped it") if ended_by else None

    def run_call(self, pool: ComputePool, pending: PendingCompute[bytes]) -> AttemptOutcome:
        """Run the call, and obey the hub meanwhile.

        Raises:
            Stale: The hub has given the attempt up. The pool is closed.
        """
        collector = NoteCollector(pool, self._saves, self.reporter.add_save)
        try:
            return self._run_call(pool, pending)
        finally:
            self._is_over.set()
            collector.close()

    def _run_call(self, pool: ComputePool, pending: PendingCompute[bytes]) -> AttemptOutcome:
        done: queue.SimpleQueue[AttemptOutcome] = queue.SimpleQueue()

        def work() -> None:
            done.put(self._value(pool, pending))
            self._orders.put(("done", 0.0))

        worker = threading.Thread(target=work, name="skyward-job-call", daemon=True)
        worker.start()
        ending = threading.Timer(0, bool)  # the end of a grace
        stopping: threading.Thread | None = None
        was_told = False
        while True:
            command, grace_s = self._next_order()
            if command == "done":
                ending.cancel()
                outcome = done.get()
                if stopping is not None:  # it knows within a second whether the call took the order
                    stopping.join()
                if self._is_cut_short(outcome):
                    return AttemptOutcome(end=AttemptEnd.STOPPED, error="saved and stopped")
                return replace(outcome, is_whole=outcome.is_whole and not was_told)
            was_told = was_told or command != "save"
            if command == "save":
                saving = threading.Thread(target=self._save, args=(pool, pending), name="skyward-job-save", daemon=True)
                saving.start()
            elif command == "stop":
                ending = threading.Timer(grace_s, self._orders.put, [("abort", 0.0)])
                ending.daemon = True
                ending.start()
                stopping = self._make_way(pool, pending)
            else:
                ending.cancel()
                pool.close(cancel=True)
                worker.join()
                outcome = done.get()
                if command == "stale":
                    raise Stale("the hub has given it up")
                stopped = AttemptOutcome(end=AttemptEnd.STOPPED, error="the hub stopped it")
                is_complete = outcome.end is AttemptEnd.COMPLETED and not self._is_cut_short(outcome)
                return replace(outcome, is_whole=False) if is_complete else stopped

    def _is_cut_short(self, outcome: AttemptOutcome) -> bool:
        """Return whether the call ended by the order to save and stop, so that the rest of it is to come."""
        ends: tuple[AttemptEnd, ...] = (AttemptEnd.COMPLETED,)  # a training that stops returns as if it were complete
        if self._spec["command"]:
            ends = (AttemptEnd.COMPLETED, AttemptEnd.FAILED)  # SIGTERM gives it a status of its own choice
        if self._sweep is not None:
            ends = (AttemptEnd.LOST,)  # it knows whether it is complete
        return self._was_stopped.is_set() and outcome.end in ends

    def drive(self) -> AttemptOutcome:
        """Drive a sweep whose trials are jobs, and obey the hub meanwhile. It needs no pool.

        Raises:
            Stale: The hub has given the attempt up.
        """
        sweep = JobsSweepRun(self._spec["sweep"], self._launch["job"], self._launch["attempt"])
        done: queue.SimpleQueue[AttemptOutcome] = queue.SimpleQueue()

        def work() -> None:
            done.put(self._outcome(sweep.run))
            self._orders.put(("done", 0.0))

        worker = threading.Thread(target=work, name="skyward-job-sweep", daemon=True)
        worker.start()
        command = ""
        while command in ("", "save"):
            command, _ = self._next_order()
        if command == "done":
            return done.get()
        sweep.leave()
        worker.join()
        if command == "stale":
            raise Stale("the hub has given it up")
        outcome = done.get()
        stopped = AttemptOutcome(end=AttemptEnd.STOPPED, error="the hub stopped it")
        return outcome if outcome.end is AttemptEnd.COMPLETED else stopped

    def report(self, link: HubLink, outcome: AttemptOutcome, *, keeps: bool) -> None:
        """Tell the hub how the attempt ended. Everything before is on disk, and is sent until the hub has it.

        Args:
            link: A link to the hub.
            outcome: The end.
            keeps: Whether the machines wait for another attempt. They cost money, so the hub must hear of it soon.

        Raises:
            Unheard: The hub did not answer while the machines may wait, or `abort` was called meanwhile.
            Stale: The hub has given the attempt up.
        """
        # Nobody looks at the fence meanwhile: the thread with the signs of life has ended.
        limit_s, must_end = (min(self._launch["keep_s"], FENCE_S), self._must_end) if keeps else (LAST_WORD_S, None)

        def say(action: Callable[[], object]) -> None:
            until_heard(action, limit_s=limit_s, folder=self._folder, must_end=must_end)

        self.reporter.stop(min(limit_s, FENCE_S), must_end)
        outcome = self._send_result(link, outcome, say)
        say(lambda: self.reporter.send_saves(link))
        facts = {"cost_usd": self.cost_usd(), "keeps": keeps, "may_retry": outcome.may_retry}
        say(lambda: link.end(outcome.end.value, outcome.error, **facts))

    def _send_result(
        self, link: HubLink, outcome: AttemptOutcome, say: Callable[[Callable[[], object]], None]
    ) -> AttemptOutcome:
        """Send the value or the packed exception. Return the outcome, which is a failure if the hub refuses a value.

        A refusal, as by a quota, does not pass by itself. Another run of the call would end with it, too.
        """
        if outcome.end is AttemptEnd.COMPLETED:
            with (self._folder / "value").open("wb") as file:
                pickle.dump(outcome.value, file, protocol=5)  # no further copy of gigabytes in memory
            try:
                say(lambda: link.send_result("value", self._folder / "value"))
            except HubError as error:
                text = (
                    f"value: the function ended, and the hub does not take its value ({error}); return less, such as "
                    "the path of a file that it writes"
                )
                return AttemptOutcome(end=AttemptEnd.FAILED, error=text, may_retry=False, is_whole=outcome.is_whole)
        if outcome.failure is not None:
            (self._folder / "error").write_bytes(outcome.failure)
            try:
                say(lambda: link.send_result("error", self._folder / "error"))
            except HubError as error:
                text = f"{outcome.error[:2000]}; the hub does not take the exception itself ({error})"
                return replace(outcome, error=text, failure=None, may_retry=False)
        return outcome

    def report_fault(self, link: HubLink, end: AttemptEnd, error: Exception) -> None:
        """Tell the hub that this runner failed. Otherwise the attempt would be lost, and run again without end."""
        self.reporter.stop()
        facts = {"cost_usd": self.cost_usd(), "keeps": False, "may_retry": False}
        text = f"runner: {in_words(error)}"
        until_heard(lambda: link.end(end.value, text, **facts), limit_s=LAST_WORD_S, folder=self._folder)

    def close(self) -> None:
        """Close its file of output. Lines that come later are dropped."""
        self._output.close()

    # Output -----------------------------------------------------------------------------------------------------------

    def write_line(self, line: LogLine) -> None:
        """Keep a line of the pool's output."""
        node = f"[{line.node}] " if len(self._launch["nodes"]) > 1 else ""
        self._write(f"{node}{line.text}\n")

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        if self._output.closed:
            return
        position = self._output.tell()
        if position < OUTPUT_LIMIT:
            if position + len(data) >= OUTPUT_LIMIT:
                data += b"[skyward] the output is too long; the rest is left out\n"
            self._output.write(data)
            self.reporter.send_feeds()

    # Within -----------------------------------------------------------------------------------------------------------

    def _next_order(self) -> tuple[str, float]:
        """Wait for an order. In slices: a signal may reach another thread, and its handler runs when this one wakes."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._orders.get(timeout=_SLICE_S)

    def _make_way(self, pool: ComputePool, pending: PendingCompute[bytes]) -> threading.Thread | None:
        """Let the call save and end. Return the thread that tells a training, and ends the call if there is none."""
        if self._sweep is not None:
            self._sweep.make_way()
        elif self._spec["command"]:
            pool.event(self._stop).set()  # the hub sends no "save" here
        else:
            thread = threading.Thread(target=self._tell_to_stop, args=(pool, pending), name="skyward-job-stop")
            thread.daemon = True
            thread.start()
            return thread
        self._was_stopped.set()
        return None

    def _tell_to_stop(self, pool: ComputePool, pending: PendingCompute[bytes]) -> None:
        """Tell the training to save and stop. One whose answer is lost may have done so: what it returns is no end."""

        def tell() -> CommandState:
            run = pool.control(pending, start_s=0.0)
            _ = run.job_id  # without a training, nothing takes the order
            try:
                return run.save_and_stop()
            except ControlFailed as error:
                if error.reason == SILENT or error.is_gone:
                    self._was_stopped.set()
                raise

        if self._told("save_and_stop", tell) is not None:
            self._was_stopped.set()
        elif not self._was_stopped.is_set():
            self._orders.put(("abort", 0.0))

    def _told(self, command: str, tell: Callable[[], CommandState]) -> CommandState | None:
        """Send a command to the training within the call. Return None if there is none that takes it.

        One that does not answer is told again until the call ends: its link may be cut for a minute, or its process be
        busy. The order may be its last chance to save.
        """
        while True:
            try:
                return tell()
            except ControlFailed as error:
                if error.reason != SILENT or self._is_over.is_set():
                    self._write(f"[skyward] {command}: no training in this call answers ({error})\n")
                    return None
            except PoolClosed:
                return None

    def _save(self, pool: ComputePool, pending: PendingCompute[bytes]) -> None:
        """Let the training save, and tell the hub when the checkpoint is durable. It ends with the call."""
        if self._sweep is not None:
            self._sweep.save()
            return
        before = self.reporter.save_count
        state = self._told("save", lambda: pool.control(pending, start_s=0.0).save(wait_s=SAVE_S))
        # A training of skyward notes its saves itself, a little later than it answers.
        if state is not None and state.state == "executed" and not self.reporter.has_saved_since(before, NOTE_S):
            self.reporter.saved_at = self.reporter.hub_time()
            self.reporter.beat_now()

    def _value(self, pool: ComputePool, pending: PendingCompute[bytes]) -> AttemptOutcome:
        sweep = self._sweep
        if sweep is not None:
            return replace(self._outcome(lambda: sweep.run(pool, pending)), is_whole=False)
        if self._is_stream:
            return self._outcome(lambda: self._stream(pool, pending))
        return self._outcome(lambda: (pending @ pool) if self._spec["on"] == "all" else (pending >> pool))

    def _stream(self, pool: ComputePool, pending: PendingCompute[Any]) -> bytes:
        """Keep the items of a generator on disk as they come, and return their number, packed as a value is."""
        count = size = 0
        with (self._folder / "items").open("ab") as file, contextlib.closing(pending >> pool) as stream:
            for packed in stream:
                item = frame_item(packed)
                size += len(item)
                if size > ITEMS_LIMIT:
                    raise UsageError(
                        f"items={count + 1}: have more than {ITEMS_LIMIT >> 20} MiB together, packed; yield less, such "
                        "as paths of files that you write"
                    )
                file.write(item)
                file.flush()
                self.reporter.send_feeds()
                count += 1
        return pickle_whole(count)

    def _outcome(self, work: Callable[[], Any]) -> AttemptOutcome:
        """Run the work, and return how it ended: its packed value, or the class of its error."""
        try:
            return AttemptOutcome(end=AttemptEnd.COMPLETED, value=work(), is_whole=True)
        except CallFailed as error:
            return AttemptOutcome(
                end=AttemptEnd.FAILED,
                error=error.text,
                failure=error.failure,
                may_retry=error.may_retry,
                is_whole=True,
            )
        except (NodeError, ProviderError) as error:
            # A process that ends by itself, or uses too much memory, would do so again on every machine.
            if isinstance(error, (BudgetExceeded, SlotLost)):
                return AttemptOutcome(end=AttemptEnd.FAILED, error=in_words(error), failure=encode_failure(error))
            return AttemptOutcome(end=AttemptEnd.LOST, error=in_words(error))
        except (PoolClosed, CancelledError) as error:
            return AttemptOutcome(end=AttemptEnd.LOST, error=in_words(error))
        except Exception as error:
            return AttemptOutcome(end=AttemptEnd.FAILED, error=in_words(error), failure=encode_failure(error))


def in_words(error: BaseException) -> str:
    """Return an error with its class."""
    return f"{type(error).__name__}: {error}"
