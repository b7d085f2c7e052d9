"""Evaluations in processes of ours on this machine: training keeps its GIL, and an evaluation can be ended."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from ....errors import InternalError, SlotLost
from ....wire.failures import decode_failure
from ....wire.payloads import encode
from ..dispatcher import Job, Outcome
from ..worker import Scored
from .arena import Arena
from .packed import MessageKind, PackedJob, pack
from .seats import Seat, SeatedDispatcher

__all__ = ["SubprocessDispatcher"]

_BOOT = """
import json, os, sys
sys.path[:] = json.loads(os.environ.pop("SKYWARD_EVALUATION_PATH"))
from skyward.training.evaluation.dispatchers.process_main import main
main()
"""
_LARGE_BYTES = 16 << 20
"""Contents are sent once: the pages of those that are larger are not kept for the next states."""
_LOOK_S = 0.2
"""Seconds between two looks whether it lives, where the system cannot tell when it ends."""
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


class WorkerProcess:
    """A Python process beside this one, which can import the same.

    It is started at once. One thread uses it; any thread may `kill` it.

    It is a session of its own: Ctrl-C in the terminal does not reach it, and its end is that of all that it started.
    """

    def __init__(self, name: str) -> None:
        """Raises OSError: the system gives no more processes or descriptors."""
        self.known: set[str] = set()
        """Digests of the contents that it has, as far as is known here."""
        self._name = name
        self._arena = Arena()
        self._had_large_contents = False
        self._connection, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), str(self._arena.fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._arena.fd),
                start_new_session=True,
                env={**os.environ, "SKYWARD_EVALUATION_PATH": json.dumps([str(folder) for folder in sys.path])},
            )
        except BaseException:
            self._connection.close()
            self._arena.close()
            raise
        finally:
            theirs.close()
        self._pidfd = -1
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # of a kernel without it: `is_alive` and `receive` look often instead
                self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        if self._pidfd < 0:
            return self._process.poll() is None
        return not wait([self._pidfd], 0)

    def send_job(self, state: Any, packed: PackedJob, contents: Mapping[str, bytes]) -> None:
        """Copies the state's large buffers to memory that both see, and the rest over the connection.

        Raises: SlotLost; OSError: there is no memory; what pickling the state raises.
        """
        self._arena.begin(keep=not self._had_large_contents)
        self._had_large_contents = sum(map(len, contents.values())) > _LARGE_BYTES
        body = encode((state, packed, dict(contents)), self._arena.put).body
        try:
            self._connection.send(MessageKind.JOB)
            self._connection.send_bytes(body)
        except OSError as error:
            raise self._lost() from error

    def receive(self) -> tuple[MessageKind, bytes]:
        """Its next answer; waits for it. Raises: SlotLost: it has died, or was killed."""
        ends: list[Connection | int] = [self._connection, *([] if self._pidfd < 0 else [self._pidfd])]
        while True:
            # Not the connection alone: what the process started may hold the other end, and outlive it.
            if self._connection in wait(ends, _LOOK_S if self._pidfd < 0 else None):
                try:
                    return self._connection.recv(), self._connection.recv_bytes()
                except (EOFError, OSError) as error:
                    raise self._lost() from error
            if not self.is_alive:
                raise self._lost()

    def kill(self) -> None:
        """Ends it and all that it started, now. Any thread; idempotent. What waits for it gets SlotLost."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; macOS says the second
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills it and waits until it has gone. Nobody may wait for its answers any more. Idempotent."""
        self.kill()
        self._process.wait()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if not self._connection.closed:
            self._connection.close()
            self._arena.close()

    def _lost(self) -> SlotLost:
        self.kill()
        code = self._process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return SlotLost(
            f"{self._name}: its process {self._process.pid} ended {how} during an evaluation; nothing is known of that "
            "evaluation, and the next one gets a new process",
            signal=-code if code < 0 else None,
            exit_code=code if code >= 0 else None,
        )
