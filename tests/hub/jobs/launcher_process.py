"""A launcher in a process of its own, beside a hub that has none."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.hub.jobs.hub_process import is_runner


class Launcher:
    """`skyward hub launcher` in a folder. Leaving the block ends it, and what it has started."""

    def __init__(self, data: Path, *options: str, **environment: str) -> None:
        self._data, self._options, self._environment = data, options, environment
        self.attempts = data / "launcher" / "attempts"

    def start(self) -> None:
        command = [sys.executable, "-m", "skyward", "hub", "launcher", "--data", str(self._data), *self._options]
        with (self._data.parent / "launcher.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **self._environment})

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def runner(self, number: int = 1) -> int:
        """Return the process of an attempt of the only job."""
        (file,) = self.attempts.glob(f"*-{number}/pid")
        return int(file.read_text())

    def starters(self) -> list[int]:
        """Return the processes that fork its runners: one at most, and none before it has started a runner."""
        pids = []
        for file in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):  # it has just ended
                if file.readlink() == self.attempts.parent / "logs":
                    pids.append(int(file.parent.name))
        return pids

    def close(self) -> None:
        self.kill()
        for file in self.attempts.glob("*/pid"):
            with contextlib.suppress(OSError):  # it ends at this moment
                if is_runner(pid := int(file.read_text())):  # of a test that failed
                    os.kill(pid, signal.SIGKILL)
