"""Standard streams of a slot: which output belongs to which call, muting, and no terminal.

Standard output and error of a process slot are pipes to the agent. So the output of C code and subprocesses is captured
like Python's. When a call that wrote something ends, a marker follows its output, and the agent splits there. Calls
that wrote nothing cost one system call and no marker.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import io
import os
import select
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

from ...calls.output import install_muter
from ...errors import InteractiveInput
from ...values.displays import Display
from ...values.topology import InstanceInfo
from ...wire.displays import pieces
from ...wire.frames import QUIET
from .runtime import current_call

Stream = Literal["stdout", "stderr"]
_FDS: dict[Stream, int] = {"stdout": 1, "stderr": 2}
_MARKER = struct.Struct("<s16ssQ")
DISPLAY_HEAD = struct.Struct("<s16ssQH")
_MAX_PIECE = select.PIPE_BUF - DISPLAY_HEAD.size
"""Bytes of a piece of a display. A write of PIPE_BUF bytes is never mixed with those of others."""
MARKER_SIZE = _MARKER.size
END, DISPLAY = b"\x02", b"\x03"
"""Kinds of marks in a pipe: the end of a task's output, and a piece of a display."""
_ZERO = bytes(4)
_LOG_PIECE = 16 * 1024
"""Most characters per LOG frame, each of at most 4 bytes: far below the size limit of a frame."""


def marker(token: bytes, task: int) -> bytes:
    """Return the bytes that end a task's output: a secret of this slot and its agent, then the task."""
    return _MARKER.pack(b"\x1e", token, END, task)


def display_piece(token: bytes, task: int, piece: bytes) -> bytes:
    """Return the bytes that put a piece of a display between the output of a task."""
    return DISPLAY_HEAD.pack(b"\x1e", token, DISPLAY, task, len(piece)) + piece


class _Muter:
    """Implementation behind `@sky.stdout` and the like; see skyward.calls.output."""

    def __init__(self, mute: Callable[[Stream], contextlib.AbstractContextManager[None]]) -> None:
        self._mute = mute

    def info(self) -> InstanceInfo | None:
        call = current_call()
        return None if call is None else call.info

    def muted(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        return self._mute(stream)


class ProcessStreams:
    """Streams of a slot that runs one call at a time. `page` is the slot's shared page; see `page`."""

    def __init__(self, token: bytes, page: Any, drained: int, reading: int) -> None:
        self._token = token
        self._page = page
        self._drained_at = drained
        self._reading_at = reading
        self._drained = 0
        self._pipe = _file_of(1)
        self._output = _poll_of_pipes()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True, write_through=False)
        install_muter(_Muter(self.muted))

    def begin(self) -> None:
        self._drained = self._page[self._drained_at]

    def end(self, task: int) -> int:
        """End the task's output here, and return the flags of its last frame."""
        _flush()
        # The order of these reads matters. The agent sets READING before it reads the pipe, and counts the bytes in
        # DRAINED before it clears READING. So looking at the pipe, READING and DRAINED in this order misses nothing.
        page = self._page
        if not (self._has_output() or page[self._reading_at]) and page[self._drained_at] == self._drained:
            return QUIET
        end = marker(self._token, task)
        for fd in (1, 2):
            with contextlib.suppress(OSError):  # the user has closed it
                os.write(fd, end)
        return 0

    def _has_output(self) -> bool:
        """Return whether a pipe holds output that the agent has not read."""
        if self._output is not None and not self._output.poll(0):  # the common case, in one system call
            return False
        return _unread(1) or _unread(2)  # of the streams as they are now: the user may have redirected them

    @contextlib.contextmanager
    def muted(self, stream: Stream) -> Iterator[None]:
        """Point the file descriptor at /dev/null, for Python, C code and new subprocesses alike."""
        fd = _FDS[stream]
        _flush()
        saved = os.dup(fd)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, fd)
        os.close(null)
        try:
            yield
        finally:
            _flush()
            os.dup2(saved, fd)
            os.close(saved)

    def display(self, task: int, display: Display) -> bool:
        """Write a display behind the text so far, for the agent to find. Returns False if stdout is not the pipe.

        Through the pipe, because only there the display keeps its place among the lines. The pieces are short, so
        neither another thread nor a child process writes into one.
        """
        _flush()
        if _file_of(1) != self._pipe:
            return False
        for piece in pieces(display, _MAX_PIECE):
            os.write(1, display_piece(self._token, task, piece))
        return True


def _poll_of_pipes() -> select.poll | None:
    """Return a poll that tells in one system call whether either pipe holds anything; None where that is impossible.

    It needs the pipes' reading ends, which Linux opens by the writing ones.
    """
    poll = select.poll()
    try:
        for fd in (1, 2):
            poll.register(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), select.POLLIN)
    except OSError:  # no /proc
        return None
    return poll


def _unread(fd: int) -> bool:
    try:
        return fcntl.ioctl(fd, termios.FIONREAD, _ZERO) != _ZERO
    except OSError:  # the user has closed it, or redirected it to a file
        return False


def _file_of(fd: int) -> tuple[int, int]:
    try:
        status = os.fstat(fd)
    except OSError:  # the user has closed it
        return 0, 0
    return status.st_dev, status.st_ino


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or replaced by the user
            continue


SendLog = Callable[[int, int, bytes], None]
"""Takes (task, 0 for stdout or 1 for stderr, text)."""


class ThreadStreams:
    """Streams of a slot that runs several calls in threads: Python's prints are tagged and muted per task.

    C code and subprocesses write to the slot's file descriptors, where their tasks cannot be told apart. Their output
    is tagged with the node only, and muting does not affect it.
    """

    def __init__(self, send: SendLog, send_display: Callable[[int, bytes], None]) -> None:
        self._owner = os.getpid()
        self._send_display = send_display
        self._local = threading.local()
        self._send = send
        sys.stdout = _TaskStream(sys.stdout, 0, self._local, send)
        sys.stderr = _TaskStream(sys.stderr, 1, self._local, send)
        install_muter(_Muter(self.muted))

    def begin(self) -> None:
        self._local.muted = []

    def end(self, task: int) -> int:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _TaskStream):
                stream.end_line(task)
        return 0

    def display(self, task: int, display: Display) -> bool:
        """Send a display behind the text so far. Returns False in a child process, because the link is its parent's."""
        if os.getpid() != self._owner:
            return False
        if _FDS["stdout"] not in getattr(self._local, "muted", ()):
            self.end(task)
            for piece in pieces(display):
                self._send_display(task, piece)
        return True

    @contextlib.contextmanager
    def muted(self, stream: Stream) -> Iterator[None]:
        muted: list[int] = self._local.muted
        muted.append(_FDS[stream])
        try:
            yield
        finally:
            muted.remove(_FDS[stream])


class _TaskStream(io.TextIOBase):
    """Replacement of sys.stdout in a thread slot: sends whole lines to the agent with the task's number."""

    def __init__(self, below: Any, number: int, local: threading.local, send: SendLog) -> None:
        self._below = below
        self._number = number
        self._local = local
        self._send = send
        self._partial: dict[int, str] = {}

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number + 1

    def write(self, text: str) -> int:
        call = current_call()
        if call is None:
            self._below.write(text)
            self._below.flush()
        elif self._number + 1 not in getattr(self._local, "muted", ()):
            whole, newline, rest = (self._partial.pop(call.task, "") + text).rpartition("\n")
            if newline:
                self._send_text(call.task, whole + newline)
            if rest:
                self._partial[call.task] = rest
        return len(text)

    def end_line(self, task: int) -> None:
        rest = self._partial.pop(task, "")
        if rest:
            self._send_text(task, rest)

    def _send_text(self, task: int, text: str) -> None:
        for at in range(0, len(text), _LOG_PIECE):
            self._send(task, self._number, text[at : at + _LOG_PIECE].encode())


def forbid_terminal() -> None:
    """Make `input()`, `breakpoint()` and reading stdin raise a clear error, because a task has no terminal."""

    def no_input(prompt: object = "") -> NoReturn:
        raise InteractiveInput("input(): a task has no terminal; pass the value as an argument of the function")

    def no_breakpoint(*args: object, **kwargs: object) -> NoReturn:
        raise InteractiveInput(
            "breakpoint(): a task has no terminal; debug with the function's .local(...), which runs it in place"
        )

    builtins.input = no_input
    sys.breakpointhook = no_breakpoint
    sys.stdin = _NoInput()


class _NoInput(io.TextIOBase):
    def read(self, size: int | None = -1) -> str:
        raise InteractiveInput("sys.stdin: a task has no terminal; pass the data as an argument of the function")

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        return self.read()

    def __next__(self) -> str:  # type: ignore[override]
        return self.read()

    def fileno(self) -> int:
        return 0  # /dev/null: a subprocess that inherits it reads end-of-file
