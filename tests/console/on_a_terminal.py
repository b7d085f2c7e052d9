"""Running a Python program on a terminal of ours: a real pty, and a screen that shows what a person would see."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Self

from tests.console.screen import Screen

__all__ = ["Program"]

_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Program:
    """A program with a terminal as its controlling one; killed when the block is left, if it still runs."""

    def __init__(self, code: str, *, rows: int = 24, columns: int = 100, env: dict[str, str] | None = None) -> None:
        self.screen = Screen(rows, columns)
        self.output = b""
        self.frames: list[list[str]] = []
        """The screen after each read."""
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **(env or {})}
        for name in {"NO_COLOR", "CI"} - set(env or {}):
            environment.pop(name, None)
        self.fd, inside = os.openpty()
        self._set_size(rows, columns)
        # Not os.forkpty: what the tests before have imported may refuse to be forked.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _TAKE_TERMINAL, sys.executable, "-c", code],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env=environment,
            start_new_session=True,
        )
        os.close(inside)
        self.pid = self._process.pid
        self.status: int | None = None

    def _set_size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, rows: int, columns: int) -> None:
        self._set_size(rows, columns)
        self.screen.resize(rows, columns)

    def read(self, for_s: float = 0.05) -> bool:
        """Take what it wrote; False: it has ended and all is read."""
        if not select.select([self.fd], [], [], for_s)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # Linux says EIO where nobody has the other end any more
            return False
        self.output += data
        self.screen.feed(data)
        self.frames.append(self.screen.lines)
        return bool(data)

    def until(self, condition: Callable[[Screen], object], within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition(self.screen):
            assert time.monotonic() < deadline, "\n".join(self.screen.all_lines)
            if not self.read():
                assert condition(self.screen), "it ended: " + "\n".join(self.screen.all_lines)

    def until_seen(self, text: str, within_s: float = 30.0) -> None:
        self.until(lambda screen: any(text in line for line in screen.all_lines), within_s)

    def wait(self, within_s: float = 30.0) -> int:
        """Until it has ended, and whoever else has the terminal: its exit status, negative for a signal."""
        deadline = time.monotonic() + within_s
        while self.read():
            assert time.monotonic() < deadline, "\n".join(self.screen.all_lines)
        if self.status is None:
            self.status = self._process.wait()
        return self.status

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def type(self, data: bytes) -> None:
        os.write(self.fd, data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            self._process.kill()
            self._process.wait()
        os.close(self.fd)
