"""Trials as jobs of the hub: each waits its turn, makes way for more urgent work, and goes on later."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import threading
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from ...errors import HubError, JobFailed
from ..client.connection import HubConnection, path_of
from ..client.job_handle import FINAL
from ..client.repeated import RepeatedRequests
from ..client.trial import STOP_ATTRIBUTE, TrialReturn, TrialTask
from .driver import answer_of
from .plans import PlaceLost

LOOK_S = 0.5
"""Seconds between two looks at reports and jobs."""


class JobTrials:
    """Place of trials that are jobs. A driver that goes on finds the job of a trial by its number.

    Args:
        requests: Requests to the hub, with the token of the driver.
        sweep: Number of the sweep.
        path: Path of the driver's attempt in the hub.
    """

    def __init__(self, requests: RepeatedRequests, sweep: int, path: str) -> None:
        self._requests, self._sweep, self._path = requests, sweep, path
        self._running: dict[int, tuple[TrialTask, str, Future[Any]]] = {}
        self._seen: dict[tuple[int, int], float] = {}
        self._version, self._must_reread = 0, False
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._failure: Exception | None = None
        self._watcher = threading.Thread(target=self._watch, name="skyward-sweep-jobs", daemon=True)
        self._watcher.start()

    def start(self, task: TrialTask) -> Future[Any]:
        """Submit the job of a trial, or find the one that an earlier driver submitted."""
        body = {"number": task.number, "task": asdict(replace(task, reports_to_hub=True))}
        if task.attempt > 1:  # the reason to stop may be that of a sweep that was stopped, and goes on
            self._answer(task.trial, "")
        row = self._requests.send("POST", f"{self._path}/trials", body)
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:  # nobody would hear of its end
                raise self._failure
            self._running[task.trial] = task, row["id"], future
            self._must_reread |= task.attempt > 1  # nobody has answered what it reported meanwhile
        return future

    def leave(self, future: Future[Any]) -> None:
        """Leave the job alone. The next driver finds it, and the hub cancels it if there will be none."""

    def close(self) -> None:
        """Stop looking at the jobs, and cancel those whose trials were given up."""
        self._is_over.set()
        self._watcher.join()
        with contextlib.suppress(HubError):  # the hub cancels them with the driver's job
            self._end_cancelled()

    # Within -----------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_S):
            try:
                self._take_reports()
                self._take_ends()
            except Exception as error:  # nobody else would end the sweep, and it would wait for ever
                self._fail(error)
                return

    def _take_reports(self) -> None:
        """Show new reports to the driver, and write its answers where the trials look for them."""
        path = path_of("v1", "sweeps", str(self._sweep), "trials")
        is_complete = False
        with self._lock:
            if self._must_reread:
                self._version, self._must_reread = 0, False
        while not is_complete:
            answer = self._requests.send("GET", path, query={"since": self._version})
            self._version, is_complete = answer["version"], answer["is_complete"]
            for row in sorted(answer["steps"], key=lambda row: row["step"]):
                self._take_report(row["trial"], row["step"], float(row["value"]))

    def _take_report(self, trial: int, step: int, value: float) -> None:
        with self._lock:
            found = self._running.get(trial)
        if found is None or self._seen.get((trial, step)) == value:
            return
        self._seen[trial, step] = value
        answer = answer_of(found[0].token)
        reason = "" if answer is None else answer(step, value)
        if reason:
            self._answer(trial, reason)

    def _answer(self, trial: int, reason: str) -> None:
        body = {"key": uuid.uuid4().hex, "system_attrs": {STOP_ATTRIBUTE: json.dumps(reason)}}
        self._requests.send("PATCH", path_of("v1", "trials", str(trial)), body)

    def _take_ends(self) -> None:
        self._end_cancelled()
        with self._lock:
            running = list(self._running.items())
        if not running:
            return
        still = set(self._requests.send("GET", f"{self._path}/trials")["jobs"])
        for trial, (_, job, future) in running:
            if job not in still and (row := self._requests.send("GET", path_of("v1", "jobs", job)))["status"] in FINAL:
                self._take_reports()  # those that it wrote last
                end = self._end_of(row)
                with self._lock:
                    self._running.pop(trial, None)
                _resolve(future, end)

    def _end_cancelled(self) -> None:
        with self._lock:
            cancelled = [trial for trial, (_, _, future) in self._running.items() if future.cancelled()]
            ended = [self._running.pop(trial) for trial in cancelled]
        for _, job, _ in ended:
            try:
                self._requests.send("POST", path_of("v1", "jobs", job, "cancel"), {})
            except HubError as error:
                if error.status != 409:  # it has just ended by itself
                    raise

    def _fail(self, error: Exception) -> None:
        """End the sweep's driver, and no trial: their jobs go on, and the next driver finds them."""
        with self._lock:
            self._failure = error
            ended, self._running = list(self._running.values()), {}
        for _, _, future in ended:
            _resolve(future, PlaceLost(error))

    def _end_of(self, row: Mapping[str, Any]) -> Any:
        """Return the end of a trial, or why it has none. For several nodes or ranks, it is the list of theirs."""
        job, state = row["id"], row["status"]
        if state != "completed":
            why = row["why"] or state.replace("_", " ")
            return JobFailed(f"job={job}: {why}; read `skyward job logs {job}`", job=job, state=state)
        content = io.BytesIO()
        with HubConnection(self._requests.address) as connection:
            connection.download(path_of("v1", "jobs", job, "results", "value"), content)
        try:
            return _unpacked(_plain(content.getvalue()))
        except (pickle.UnpicklingError, EOFError, TypeError) as error:
            return JobFailed(f"job={job}: its value is not that of a trial ({error}); retry it", job=job, state=state)


def _resolve(future: Future[Any], end: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(end, Exception):
        future.set_exception(end)
    else:
        future.set_result(end)


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, texts and their lists. A trial's node wrote them, and it runs what a user sent."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}: is nothing that a trial returns")


def _plain(data: bytes) -> Any:
    return _PlainUnpickler(io.BytesIO(data)).load()


def _unpacked(packed: Any) -> Any:
    if not isinstance(packed, bytes):
        return [_unpacked(item) for item in packed]
    end = _plain(packed)
    return None if end is None else TrialReturn(**end)
