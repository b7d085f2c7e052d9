"""Trials as jobs of the hub: each waits its turn, makes way for more urgent work, and goes on later."""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any

from ...calls.compute import ComputeFunction, PendingCompute
from ...errors import HubError, JobFailed
from ..client.connection import path_of
from ..client.jobs import FINAL, Job, submit
from ..client.repeated import RepeatedRequests
from ..client.trial import STOP_ATTRIBUTE, Trial, TrialTask
from .driver import answer_of
from .places import trial_call

LOOK_S = 0.5
"""Seconds between two looks at reports and jobs."""


class JobTrials:
    """Place of trials that are jobs. A driver that goes on finds the job of a trial by its key.

    Args:
        requests: Requests to the hub.
        sweep: Number of the sweep.
        objective: The objective.
        options: Options of `hub.submit`.
    """

    def __init__(
        self,
        requests: RepeatedRequests,
        sweep: int,
        objective: ComputeFunction[[Trial], Any],
        options: Mapping[str, Any],
    ) -> None:
        self._requests, self._sweep = requests, sweep
        whole: dict[str, Any] = {"on": "one" if options.get("nodes", 1) == 1 else "all", **options}
        self._options = {name: value for name, value in whole.items() if name != "name"}
        self._call: Callable[[TrialTask], PendingCompute[Any]] = trial_call(objective)
        self._running: dict[int, tuple[TrialTask, Job[Any], Future[Any]]] = {}
        self._seen: dict[tuple[int, int], float] = {}
        self._version = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._failure: Exception | None = None
        self._watcher = threading.Thread(target=self._watch, name="skyward-sweep-jobs", daemon=True)
        self._watcher.start()

    def start(self, task: TrialTask) -> Future[Any]:
        """Submit the job of a trial, or find the one that an earlier driver submitted."""
        if self._failure is not None:  # nobody would hear of its end
            raise self._failure
        name = f"{task.sweep}-{task.number}"[:100]
        call = self._call(replace(task, reports_to_hub=True)).with_options(nodes=None, name=name)
        job = submit(call, name=name, key=f"sweep-{self._sweep}-{task.number}", **self._options)
        if job.status in FINAL - {"completed"}:
            job.retry()
        future: Future[Any] = Future()
        with self._lock:
            self._running[task.trial] = task, job, future
        return future

    def close(self) -> None:
        """Stop looking at the jobs, and cancel those whose trials were given up."""
        self._is_over.set()
        self._watcher.join()
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
            body = {"key": uuid.uuid4().hex, "system_attrs": {STOP_ATTRIBUTE: json.dumps(reason)}}
            self._requests.send("PATCH", path_of("v1", "trials", str(trial)), body)

    def _take_ends(self) -> None:
        self._end_cancelled()
        with self._lock:
            running = list(self._running.items())
        for trial, (_, job, future) in running:
            if job.done():
                self._take_reports()  # those that it wrote last
                with self._lock:
                    self._running.pop(trial, None)
                _resolve(future, job)

    def _end_cancelled(self) -> None:
        with self._lock:
            cancelled = [trial for trial, (_, _, future) in self._running.items() if future.cancelled()]
            ended = [self._running.pop(trial) for trial in cancelled]
        for _, job, _ in ended:
            with contextlib.suppress(HubError):
                job.cancel()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        with self._lock:
            ended, self._running = list(self._running.values()), {}
        for _, _, future in ended:
            if not future.cancelled():
                future.set_exception(error)


def _resolve(future: Future[Any], job: Job[Any]) -> None:
    if future.cancelled():
        return
    try:
        error = job.exception()
        value = None if error is not None else job.result()
    except CancelledError:
        future.set_exception(JobFailed(f"job={job.id}: was cancelled; retry it, or start the sweep again", job=job.id))
    except HubError as unreachable:
        future.set_exception(unreachable)
    else:
        future.set_exception(error) if error is not None else future.set_result(value)
