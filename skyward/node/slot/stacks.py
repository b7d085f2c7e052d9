"""The Python stacks of a process that runs calls, written by a handler in C behind its shared page.

A process that hangs may never run another bytecode: C code may hold the GIL, or the main thread wait in a lock. So no
thread of Python's is asked: the agent sends a signal, `faulthandler` writes, and the agent reads the file. One that
crashes writes the stack of the thread that did there by itself.
"""

from __future__ import annotations

import faulthandler
import signal

__all__ = ["ALL_THREADS", "CRASH", "MAIN_THREAD", "STACKS_AT", "offer_stacks"]

STACKS_AT = 4096
"""Offset in the file of the shared page. The agent sets the file's position there at first, and before it sends the
signal; both sides share it, for the descriptor was passed, not opened twice."""
CRASH = b"Fatal Python error: "
"""How the text begins that a crash writes; the time of the file is then that of the crash."""

# From the end of the real-time signals, which nobody else uses: SIGUSR1 is Slurm's, Lightning's and many a script's.
_LAST = int(getattr(signal, "SIGRTMAX", 0))
MAIN_THREAD = _LAST - 2
"""Signal: the stack of the main thread, which the kernel prefers for it. It walks its own frames, so a process that
is well comes to no harm."""
ALL_THREADS = _LAST - 1
"""Signal: the stacks of all threads. It walks frames that may be changing, so it is for processes that end next."""


def offer_stacks(page_fd: int) -> None:
    """From now on the signals are answered. `page_fd` stays open as long as the process lives."""
    faulthandler.enable(file=page_fd, all_threads=False)
    if _LAST:  # macOS has no such signals
        faulthandler.register(MAIN_THREAD, file=page_fd, all_threads=False)
        faulthandler.register(ALL_THREADS, file=page_fd, all_threads=True)
