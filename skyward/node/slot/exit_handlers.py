"""Exit handlers (`atexit`) in a rank, whose process ends with its call as a script's does.

They are part of the call: what they print and write comes before its value, and its time limit holds for them.
"""

from __future__ import annotations

import atexit
import signal
import sys
import weakref
from typing import Any

_LIMIT_S = 5.0
"""Longest time in seconds for the handlers of a rank that has failed. Its failure is on its way already."""


def forget_inherited() -> None:
    """Forget what imports have registered before this process was forked: it belongs to all forks.

    A folder that is removed at exit, for example, is in use by the others.
    """
    atexit._clear()
    finalize: Any = weakref.finalize
    for finalizer in [*finalize._registry]:
        finalizer.atexit = False
    if finalize._registered_with_atexit:  # it does not register itself again
        atexit.register(finalize._exitfunc)
    if (logging := sys.modules.get("logging")) is not None:
        atexit.register(logging.shutdown)


def run_exit_handlers() -> None:
    """Run the handlers, the last first. Each runs once; what one raises is printed."""
    atexit._run_exitfuncs()


def run_late_exit_handlers() -> None:
    """Run the handlers of a rank that has failed. If they take long, the process ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # no Python handler: a handler that hangs may hold the GIL
    signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    run_exit_handlers()
    signal.setitimer(signal.ITIMER_REAL, 0)
