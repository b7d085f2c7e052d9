"""Evaluations in processes on this machine: they do not take training's GIL, and they can be killed."""

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

from ....core.by_value import loads
from ....errors import InternalError, SlotLost
from ....wire.failures import decode_failure
from ....wire.payloads import encode
from ..dispatcher import Job, Outcome
from ..worker import Scored
from .arena import Arena
from .packed import MessageKind, PackedJob, pack
from .seats import Seat, SeatedDispatcher

_BOOT = """
import json, os, sys
sys.path[:] = json.loads(os.environ.pop("SKYWARD_EVALUATION_PATH"))
from skyward.training.evaluation.dispatchers.process_main import main
main()
"""
_LARGE_BYTES = 16 << 20
"""Contents are sent once. Pages of larger ones are freed afterwards instead of kept for the next states."""
_LOOK_S = 0.2
"""Seconds between two checks of a process, on systems that cannot signal its end."""
_TRIES = 3
"""Attempts per job if the process lacks contents. From the second one on, a job carries all contents."""


class SubprocessDispatcher(SeatedDispatcher):
    """Run evaluations in Python processes beside this one, started on first use and kept. Thread-safe.

    Large tensors and arrays go through shared memory, copied once. Factory, functions and payload are sent to each
    process once. A cancelled or timed-out evaluation is killed with its process, and a new process takes its place.
    The processes end with this one, however it ends.

    Args:
        slots: processes, and evaluations at once, >= 1. Each keeps models, contents and the memory of one state.
        name: name for records and plots.

    Raises:
        UsageError: `slots` is below 1.

    Example:
        >>> SubprocessDispatcher(slots=2)
        <SubprocessDispatcher 'subprocess' slots=2>
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
        # The process died while idle, and nothing of this job has run, so it is safe to try again in a new one.
        return self._outcome(self._started()[0], job, began)

    def _started(self) -> tuple[WorkerProcess, bool]:
        """Return the process, and whether it is new."""
        with self._lock:
            if self._is_given_up:
                raise SlotLost(f"{self._name}: the evaluation was cancelled before it began; submit it again")
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
                return self._read(loads(body), sent_at)
            if kind == MessageKind.FAILED:
                raise decode_failure(pickle.loads(body), where=self._name, node=None, task="evaluation")
            process.known.difference_update(pickle.loads(body))
        raise InternalError(f"{self._name}: the process lacks contents that were sent; report this bug")

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
        return "its process was killed, and the next evaluation gets a new one"

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.close()
                self._process = None


class WorkerProcess:
    """Python process beside this one with the same import path.

    It starts at once. One thread uses it; any thread may `kill` it. It leads its own session, so Ctrl-C in the terminal
    does not reach it, and killing it kills everything that it started.
    """

    def __init__(self, name: str) -> None:
        """Start the process; raise OSError if the system has no more processes or descriptors."""
        self.known: set[str] = set()
        """Digests of the contents that it has, as far as this side knows."""
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
            with contextlib.suppress(OSError):  # an old kernel: `is_alive` and `receive` poll instead
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
        """Copy the state's large buffers to shared memory, and send the rest over the connection.

        Raises:
            SlotLost: the process has died.
            OSError: there is no memory.
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
        """Wait for the next answer and return it; raise SlotLost if the process died or was killed."""
        ends: list[Connection | int] = [self._connection, *([] if self._pidfd < 0 else [self._pidfd])]
        while True:
            # Not the connection alone: children of the process may hold the other end and outlive it.
            if self._connection in wait(ends, _LOOK_S if self._pidfd < 0 else None):
                try:
                    return self._connection.recv(), self._connection.recv_bytes()
                except (EOFError, OSError) as error:
                    raise self._lost() from error
            if not self.is_alive:
                raise self._lost()

    def kill(self) -> None:
        """Kill the process and everything it started. Any thread, idempotent. Waiting calls raise SlotLost."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # already gone (macOS: PermissionError)
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and wait for its end. No thread may be waiting for an answer. Idempotent."""
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
            f"{self._name}: its process {self._process.pid} ended {how} during an evaluation, and the next one gets a "
            "new process; check the memory that an evaluation needs",
            signal=-code if code < 0 else None,
            exit_code=code if code >= 0 else None,
        )
