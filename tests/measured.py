"""Coverage of the processes of a node. Only `make coverage` uses this; the product knows nothing of it.

Coverage starts in a child process through a .pth file in site-packages, and writes its figures when the process ends.
Two habits of skyward prevent both:

- Agents and keepers start under `python -S`, in a third of the time. That reads no .pth file, so the command line of
  such a child gets a line that starts coverage first.
- An agent that ends kills its zygotes, and their slots die with them, because nothing in them is worth a wait. A
  measured agent waits until they have ended by themselves, and a measured zygote waits for its slots.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import coverage

ROOT = Path(__file__).resolve().parent.parent
_FIRST_LINE = "import sys; sys.path[:0] = {path!r}; from tests import measured; measured.start()\n"
_ZYGOTE = "skyward.node.slot.zygote"
_SLOTS_END_S, _ZYGOTE_ENDS_S = 3.0, 5.0


def start() -> None:
    """Measure this process, which is part of a node, and its children."""
    coverage.process_startup()  # nothing more where a .pth file did
    atexit.register(_wait_for_children)  # runs before coverage's own handler, so no child loses its parent too early
    measure_children()


def measure_children() -> None:
    """Measure the children of this process that are parts of nodes. All others measure themselves."""
    _unlock_collector()
    start, kill = subprocess.Popen.__init__, subprocess.Popen.kill

    @functools.wraps(start)
    def start_measured(self: subprocess.Popen[Any], args: Any, *rest: Any, **options: Any) -> None:
        start(self, measured(args), *rest, **options)

    @functools.wraps(kill)
    def kill_measured(self: subprocess.Popen[Any]) -> None:
        if isinstance(self.args, list) and any(_ZYGOTE in str(word) for word in self.args):
            with contextlib.suppress(subprocess.TimeoutExpired):  # its socket is closed, so it ends by itself
                self.wait(_ZYGOTE_ENDS_S)
        kill(self)

    subprocess.Popen.__init__ = start_measured  # type: ignore[method-assign]
    subprocess.Popen.kill = kill_measured  # type: ignore[method-assign]


def _unlock_collector() -> None:
    """Let coverage collect without its lock.

    Its trace function takes a lock. A signal handler of skyward may raise just then, and nobody would release that lock
    again. The lock guards a dictionary that only grows, and coverage copies it with care.
    """
    from coverage.collector import Collector

    running = coverage.Coverage.current()
    collector = getattr(running, "_collector", None)
    if collector is not None:
        collector.data_lock = None
    for name in ("lock_data", "unlock_data"):  # those of forked children
        setattr(Collector, name, lambda _: None)


def measured(command: Any) -> Any:
    """Return the command of a child; a part of a node starts coverage first."""
    if not isinstance(command, list) or sys.executable not in command or "-c" not in command:
        return command
    place = command.index("-c") + 1
    flags = command[command.index(sys.executable) + 1 : place]
    if "-I" in flags or ("-S" not in flags and _ZYGOTE not in command[place]):
        return command
    first_line = _FIRST_LINE.format(path=[str(ROOT), str(_site_packages())])
    return [*command[:place], first_line + command[place], *command[place + 1 :]]


def _site_packages() -> Path:
    return Path(coverage.__file__).parent.parent


def _wait_for_children() -> None:
    deadline = time.monotonic() + _SLOTS_END_S
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.005)
