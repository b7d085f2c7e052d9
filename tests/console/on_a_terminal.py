"""Run a Python program on a real pty, with a screen that shows what a person would see."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Self

from tests.console.screen import Screen

__all__ = ["Program"]

_LEAD_SESSION = """
import fcntl, os, signal, sys, termios
control = int(sys.argv[1])
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
pid = os.fork()
if pid == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.close(control)
    os.execv(sys.argv[2], sys.argv[2:])
for fd in (0, 1, 2):
    os.close(fd)
os.write(control, b"%d\\n" % pid)
status = os.waitpid(pid, 0)[1]
os.write(control, b"%d\\n" % os.waitstatus_to_exitcode(status))
os.read(control, 1)
"""
"""What a shell is to a program: the leader of its session, which is still there when the program ends. The kernel
discards what nobody has read from a terminal yet when the leader of its session ends."""


class Program:
    """A program with its own controlling terminal. It is killed when the block is left, if it still runs."""

    def __init__(self, code: str, *, rows: int = 24, columns: int = 100, env: dict[str, str] | None = None) -> None:
        self.screen = Screen(rows, columns)
        self.output = b""
        self.frames: list[list[str]] = []
        """The screen after each read."""
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **(env or {})}
        for name in {"NO_COLOR", "CI", "PYTHONUNBUFFERED"} - set(env or {}):
            environment.pop(name, None)
        self.fd, inside = os.openpty()
        self._set_size(rows, columns)
        ours, theirs = socket.socketpair()
        with theirs:
            # os.forkpty is not used: modules that other tests imported may refuse to be forked.
            self._leader = subprocess.Popen(
                [sys.executable, "-S", "-c", _LEAD_SESSION, str(theirs.fileno()), sys.executable, "-c", code],
                stdin=inside,
                stdout=inside,
                stderr=inside,
                env=environment,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        os.close(inside)
        self._control = ours.makefile("r")
        ours.close()  # the file keeps the connection
        self.pid = int(self._control.readline())
        self.status: int | None = None

    def _set_size(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, rows: int, columns: int) -> None:
        self._set_size(rows, columns)
        self.screen.resize(rows, columns)

    def read(self, for_s: float = 0.05) -> bool:
        """Read the program's output. Returns False once it has ended and all is read."""
        if not select.select([self.fd], [], [], for_s)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # Linux raises EIO if nobody has the other end
            return False
        self.output += data
        self.screen.feed(data)
        self.frames.append(self.screen.lines)
        return bool(data)

    def until(self, condition: Callable[[Screen], object], within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition(self.screen):
            assert time.monotonic() < deadline, "\n".join(self.screen.all_lines)
            if not self.read():
                assert condition(self.screen), "it ended: " + "\n".join(self.screen.all_lines)

    def until_seen(self, text: str, within_s: float = 60.0) -> None:
        self.until(lambda screen: any(text in line for line in screen.all_lines), within_s)

    def wait(self, within_s: float = 60.0) -> int:
        """Wait until the program and every other process on the terminal have ended.

        Returns its exit status, negative for a signal.
        """
        deadline = time.monotonic() + within_s
        while self.read():
            assert time.monotonic() < deadline, "\n".join(self.screen.all_lines)
        if self.status is None:
            self.status = int(self._control.readline())
        return self.status

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def type(self, data: bytes) -> None:
        os.write(self.fd, data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            self.kill()
        self._control.close()
        os.close(self.fd)
        self._leader.wait()
