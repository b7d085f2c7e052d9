"""Exit handlers of a forked rank: its own run, and those of the process that it was forked from do not."""

from __future__ import annotations

import subprocess
import sys

FORK = """
import atexit, logging, logging.handlers, os, sys, weakref
from skyward.node.slot.exit_handlers import forget_inherited, run_exit_handlers

class Folder: pass

shared = Folder()
weakref.finalize(shared, print, "removed the folder of all")
atexit.register(print, "removed the cache of all")
pid = os.fork()
if pid == 0:
    forget_inherited()
    own = Folder()
    weakref.finalize(own, print, "removed its own folder")
    atexit.register(print, "its own handler")
    atexit.register(lambda: 1 / 0)
    log = logging.getLogger("own")
    log.propagate = False
    log.addHandler(logging.handlers.MemoryHandler(10, target=logging.StreamHandler(sys.stdout)))
    log.warning("kept until the end")
    run_exit_handlers()
    run_exit_handlers()
    sys.stdout.flush()
    os._exit(0)
os.waitpid(pid, 0)
sys.stdout.flush()
os._exit(0)
"""


def test_a_fork_runs_its_own_handlers_once() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=True)
    assert sorted(done.stdout.splitlines()) == ["its own handler", "kept until the end", "removed its own folder"]
    assert "ZeroDivisionError" in done.stderr
