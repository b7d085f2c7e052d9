"""Several server processes on one socket: started, started again when they die, and ended together."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from ...errors import UsageError

END_S = 15.0
"""Seconds that processes have to end, before they are killed."""
PAUSE_S = 1.0
"""Seconds between the death of a process and its replacement."""
REFUSED = 64
"""Exit status of a process whose configuration cannot be used: a further one would fare the same."""

_log = logging.getLogger(__name__)
_CAUGHT = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGCHLD})

Work = Callable[[int], None]
"""`work(number)`: serve as the process of this number, until SIGTERM."""


def supervise(workers: int, work: Work) -> None:
    """Keep `workers` processes running until SIGINT or SIGTERM. Call it on the main thread, before any other starts.

    Processes are forked, so they share the open socket and the imported modules. One whose supervisor was killed ends
    by itself.

    Raises:
        UsageError: A process cannot use its configuration. It has logged why.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _CAUGHT)
    supervisor = _Supervisor(workers, work, before)
    try:
        supervisor.run()
    finally:
        supervisor.end()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Supervisor:
    def __init__(self, workers: int, work: Work, mask: set[signal.Signals | int]) -> None:
        self._work = work
        self._mask = mask
        self._numbers: dict[int, int] = {}  # by process id
        self._due = dict.fromkeys(range(workers), 0.0)  # when a process of this number is to start
        self._held = os.pipe()  # its writing end is closed when this process dies

    def run(self) -> None:
        """Start what is due and replace what dies, until a signal to end."""
        while True:
            now = time.monotonic()
            for number in [number for number, due in self._due.items() if due <= now]:
                del self._due[number]
                self._numbers[self._fork(number)] = number
            wait_s = min((due - now for due in self._due.values()), default=3600.0)
            caught = signal.sigtimedwait(_CAUGHT, wait_s)
            if caught is not None and caught.si_signo != signal.SIGCHLD:
                return
            for number, status in self._collect():
                if status == REFUSED:
                    raise UsageError("server.workers: a process cannot start; see its message in the log")
                _log.error("Server process %d ended with status %d; another one starts", number, status)
                self._due[number] = time.monotonic() + PAUSE_S

    def end(self) -> None:
        """End all processes: SIGTERM lets running requests end, a second signal to this process or END_S do not."""
        deadline = time.monotonic() + END_S
        self._send(signal.SIGTERM)
        while self._numbers:
            caught = signal.sigtimedwait(_CAUGHT, max(0.0, deadline - time.monotonic()))
            if caught is None:
                self._send(signal.SIGKILL)
                deadline = time.monotonic() + END_S
            elif caught.si_signo != signal.SIGCHLD:
                self._send(signal.SIGTERM)
            self._collect()
        for descriptor in self._held:
            os.close(descriptor)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._numbers:
            os.kill(pid, number)  # not collected yet, so the id is still its own

    def _collect(self) -> list[tuple[int, int]]:
        """Return the number and exit status of each process that has ended."""
        ended = []
        for pid in list(self._numbers):
            collected, status = os.waitpid(pid, os.WNOHANG)
            if collected:
                ended.append((self._numbers.pop(pid), os.waitstatus_to_exitcode(status)))
        return ended

    def _fork(self, number: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            os.setpgid(0, 0)  # Ctrl-C reaches the supervisor alone, which ends the others in order
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            os.close(self._held[1])
            threading.Thread(target=_end_with, args=(self._held[0],), name="skyward-hub-orphan", daemon=True).start()
            self._work(number)
            status = 0
        except UsageError as error:
            _log.error("%s", error)
            status = REFUSED
        except BaseException:
            _log.exception("Server process %d failed", number)
        finally:
            sys.stderr.flush()
            os._exit(status)  # what runs behind this fork's call belongs to the supervisor


def _end_with(held: int) -> None:
    """Wait until the supervisor is gone, and end this process in order."""
    os.read(held, 1)
    os.kill(os.getpid(), signal.SIGTERM)
