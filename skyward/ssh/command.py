"""Local processes: fed with input, read line by line, killed at a deadline or on request."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from ..errors import UsageError

_PIECE = 256 * 1024
_LOOK_S = 0.1
"""Interval at which `stop` is checked, in seconds."""
_HELD_S = 1.0
"""Time to wait for output after the process has exited while another process holds its pipes, in seconds."""


class Stopped(Exception):
    """The command was killed because `stop` was set."""


@dataclass(frozen=True, kw_only=True)
class SSHResult:
    """Exit code and output of a command.

    Example:
        >>> result = SSHResult(code=0, stdout=b"Linux\\n", stderr=b"")
        >>> result.code, result.text
        (0, 'Linux')
    """

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """Standard output as text, without trailing newlines. Invalid UTF-8 is replaced."""
        return self.stdout.decode(errors="replace").rstrip("\n")

    @property
    def error_text(self) -> str:
        """Standard error as text, without surrounding white space. Invalid UTF-8 is replaced."""
        return self.stderr.decode(errors="replace").strip()


class _Output:
    """Output of one pipe: everything behind the line `marker`, and each line as it arrives."""

    def __init__(self, on_line: Callable[[str], None] | None, marker: bytes) -> None:
        self._pieces: list[bytes] = []
        self._rest = b""
        self._on_line = on_line
        self._marker = marker

    def add(self, piece: bytes) -> None:
        if self._marker:
            piece = self._behind_marker(piece)
        self._pieces.append(piece)
        if self._on_line is not None:
            *lines, self._rest = (self._rest + piece).replace(b"\r", b"\n").split(b"\n")
            for line in filter(None, lines):
                self._on_line(line.decode(errors="replace"))

    def _behind_marker(self, piece: bytes) -> bytes:
        self._rest += piece
        _, marker, after = self._rest.partition(self._marker + b"\n")
        if not marker:
            return b""
        self._marker, self._rest = b"", b""
        return after

    def end(self) -> bytes:
        if self._marker:  # the marker never came, so keep everything: it may say why
            self._pieces.append(self._rest)
        elif self._on_line is not None and self._rest:
            self._on_line(self._rest.decode(errors="replace"))
        return b"".join(self._pieces)


def run_process(
    argv: list[str],
    *,
    input: bytes | BinaryIO | None = None,  # noqa: A002  # as in subprocess.run
    timeout_s: float,
    on_line: Callable[[str], None] | None = None,
    marker: str = "",
    stop: threading.Event | None = None,
) -> SSHResult:
    """Run `argv` to its end, in its own session: it has no terminal to prompt on, and Ctrl-C does not reach it.

    Args:
        argv: the command line.
        input: data, or a file to read piece by piece; None for no input.
        timeout_s: seconds until the process is killed.
        on_line: called by this thread with each line of both streams as it arrives.
        marker: line of standard output after which the command's own output begins.
        stop: kills the process when set.

    Raises:
        UsageError: this process ignores SIGCHLD.
        TimeoutError: the process ran longer than `timeout_s`.
        Stopped: `stop` was set.

    On these and all other exceptions the process and its group have been killed.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise UsageError(
            "SIGCHLD=SIG_IGN: loses the exit codes of child processes such as `ssh`; call "
            "signal.signal(signal.SIGCHLD, signal.SIG_DFL) before opening the pool"
        )
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
    )
    try:
        out, err = _Output(on_line, marker.encode()), _Output(on_line, b"")
        _Run(process, _OutputSource(input), out, err).finish(time.monotonic() + timeout_s, stop or threading.Event())
        return SSHResult(code=process.wait(), stdout=out.end(), stderr=err.end())
    except TimeoutError:
        raise TimeoutError(f"no end within {timeout_s:g} s") from None  # words: ok, callers name the command
    finally:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has exited, or runs as another user
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):  # unwritten input is lost with the process
                pipe.close()


class _OutputSource:
    """Input of a process, in pieces."""

    def __init__(self, data: bytes | BinaryIO | None) -> None:
        self._file = None if data is None or isinstance(data, bytes) else data
        self._rest = memoryview(data) if isinstance(data, bytes) else memoryview(b"")

    def write_to(self, fd: int) -> bool:
        """Write as much as fits; return False at the end of the input."""
        if not self._rest and self._file is not None:
            self._rest = memoryview(self._file.read(_PIECE))
        if not self._rest:
            return False
        with contextlib.suppress(BlockingIOError):  # the pipe is full; the selector reports when it has room
            self._rest = self._rest[os.write(fd, self._rest[:_PIECE]) :]
        return True


class _Run:
    """Pipes of a process, served by one thread."""

    def __init__(self, process: subprocess.Popen[bytes], source: _OutputSource, out: _Output, err: _Output) -> None:
        self._process = process
        self._selector = selectors.DefaultSelector()
        for pipe, data in ((process.stdin, source), (process.stdout, out), (process.stderr, err)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                event = selectors.EVENT_WRITE if data is source else selectors.EVENT_READ
                self._selector.register(pipe, event, data)

    def finish(self, deadline: float, stop: threading.Event) -> None:
        """Serve the pipes until the process has exited and its output is read. Raises TimeoutError, Stopped."""
        held_until = float("inf")
        with self._selector:
            while self._process.poll() is None or (self._is_open and time.monotonic() < held_until):
                if stop.is_set():
                    raise Stopped("stopped on request")
                if time.monotonic() > deadline:
                    raise TimeoutError
                self._step()
                if self._process.returncode is not None:
                    self._close_input()
                    held_until = min(held_until, time.monotonic() + _HELD_S)

    @property
    def _is_open(self) -> bool:
        return bool(self._selector.get_map())

    def _step(self) -> None:
        if not self._is_open:
            with contextlib.suppress(subprocess.TimeoutExpired):  # `finish` checks the deadline between two steps
                self._process.wait(_LOOK_S)
            return
        for key, _ in self._selector.select(_LOOK_S):
            if not _serve(key):
                self._selector.unregister(key.fileobj)
                if isinstance(key.data, _OutputSource):
                    self._close_input()

    def _close_input(self) -> None:
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
            pipe.close()


def _serve(key: selectors.SelectorKey) -> bool:
    """Move some bytes; return False when this pipe is done."""
    try:
        if isinstance(key.data, _OutputSource):
            return key.data.write_to(key.fd)
        piece = os.read(key.fd, _PIECE)
    except BlockingIOError:  # nothing to read after all
        return True
    except OSError:  # the other end is closed
        return False
    key.data.add(piece)
    return bool(piece)
