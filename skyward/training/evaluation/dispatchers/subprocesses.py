"""Evaluations in processes of ours on this machine: training keeps its GIL, and an evaluation can be ended."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable

from ....errors import InternalError, SlotLost
from ....wire.failures import decode_failure
from ..dispatcher import Job, Outcome
from ..worker import Scored
from .channel import MessageKind
from .packed import pack
from .process import WorkerProcess
from .seats import Seat, SeatedDispatcher

__all__ = ["SubprocessDispatcher"]

_TRIES = 3
"""How often a job is sent to a process that says it lacks contents. The second time it gets all of them."""


class SubprocessDispatcher(SeatedDispatcher):
    """Runs evaluations in Python processes beside this one, started with the first jobs and kept. Thread-safe.

    Large tensors and arrays go through shared memory, once copied; factory, functions and payload are sent to each
    process once. One that is cancelled or runs out of time is killed with its process, and another takes its place.
    The processes end with this one, however it ends.

    Args:
        slots: processes, and evaluations at once, >= 1. Each keeps models, contents and the memory of one state.
        name: for records and pictures.

    Raises: UsageError.
    """

    def __init__(self, *, slots: int = 1, name: str = "subprocess") -> None:
        super().__init__(slots=slots, name=name)

    def _new_seat(self, number: int) -> Seat:
        return _Beside(number, self.name if self.slots == 1 else f"{self.name} {number}")


class _Beside(Seat):
    ends_when_given_up = True

    def __init__(self, number: int, name: str) -> None:
        super().__init__(number)
        self._name = name
        self._process: WorkerProcess | None = None
        self._is_given_up = False
        self._lock = threading.Lock()

    def run(self, job: Job, began: Callable[[], None]) -> Outcome:
        process, is_new = self._started()
        has_begun = False

        def begin() -> None:
            nonlocal has_begun
            has_begun = True
            began()

        try:
            return self._outcome(process, job, begin)
        except SlotLost:
            if is_new or has_begun:
                raise
        # It had died while nothing ran, and nothing of this job has run.
        return self._outcome(self._started()[0], job, began)

    def _started(self) -> tuple[WorkerProcess, bool]:
        """The process, and whether it is a new one."""
        with self._lock:
            if self._is_given_up:
                raise SlotLost(f"{self._name}: the evaluation was given up before it began")
            if self._process is not None and self._process.is_alive:
                return self._process, False
            if self._process is not None:
                self._process.close()
            self._process = WorkerProcess(self._name)
            return self._process, True

    def _outcome(self, process: WorkerProcess, job: Job, began: Callable[[], None]) -> Outcome:
        sent_at = time.time()
        for attempt in range(_TRIES):
            known = process.known if attempt == 0 else ()
            packed, contents = pack(job, known, is_same_machine=True)
            process.send_job(job.state, packed, contents)
            kind, body = process.receive()
            if kind == MessageKind.BEGUN:
                process.known.update(contents)
                began()
                kind, body = process.receive()
            if kind == MessageKind.DONE:
                return self._read(pickle.loads(body), sent_at)
            if kind == MessageKind.FAILED:
                raise decode_failure(pickle.loads(body), where=self._name, node=None, task="evaluation")
            process.known.difference_update(pickle.loads(body))
        raise InternalError(f"{self._name}: the process lacks contents that it was sent")

    def _read(self, scored: Scored, sent_at: float) -> Outcome:
        return Outcome(
            value=scored.value,
            worker=self._name,
            started_at=scored.started_at,
            finished_at=scored.finished_at,
            load_s=scored.loaded_at - scored.started_at,
            transfer_s=max(0.0, scored.started_at - sent_at),
        )

    def give_up(self) -> str:
        with self._lock:
            self._is_given_up = True
            if self._process is not None:
                self._process.kill()
        return "its process was ended, and the next one gets a new one"

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.close()
                self._process = None
