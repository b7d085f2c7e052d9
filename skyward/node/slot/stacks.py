"""Python stacks of a process that runs calls, written by a C handler behind the process's shared page.

A process that hangs may never run another bytecode: C code may hold the GIL, or the main thread may wait for a lock. So
no Python thread takes part. The agent sends a signal, `faulthandler` writes, and the agent reads the file. A crashing
process writes the stack of the crashed thread by itself.
"""

from __future__ import annotations

import faulthandler
import signal

STACKS_AT = 4096
"""Offset in the file of the shared page. The agent sets the file's position to it, at first and before each signal.
Both sides share the position, because the descriptor was passed and not opened twice."""
CRASH = b"Fatal Python error: "
"""First bytes of a crash report; the file's time is then the time of the crash."""

# Near the end of the real-time signals, which nobody uses. SIGUSR1 belongs to Slurm, Lightning and many scripts.
_LAST = int(getattr(signal, "SIGRTMAX", 0))
MAIN_THREAD = _LAST - 2
"""Signal for the stack of the main thread, to which the kernel prefers to deliver it. That thread walks its own frames,
so a healthy process comes to no harm."""
ALL_THREADS = _LAST - 1
"""Signal for the stacks of all threads. It walks frames that may be changing, so use it only on doomed processes."""


def offer_stacks(page_fd: int) -> None:
    """Answer the signals from now on. `page_fd` must stay open for the life of the process."""
    faulthandler.enable(file=page_fd, all_threads=False)
    if _LAST:  # macOS has no such signals
        faulthandler.register(MAIN_THREAD, file=page_fd, all_threads=False)
        faulthandler.register(ALL_THREADS, file=page_fd, all_threads=True)
