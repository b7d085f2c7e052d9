"""Lines that stay at the bottom of a terminal while everything else scrolls above them.

The terminal itself does the work. Its upper rows become the scrolling region (DECSTBM), and the lines are painted below
them. Each paint is one write that ends with the cursor back in its place. So the output of the program need not go
through this module: prints, output of C code and of subprocesses, `input()` and debuggers stay whole. The alternative,
to erase the lines before each print and draw them again, would replace sys.stdout and tear the output of C code.

Limits: a full-screen program (an editor) that is started meanwhile is painted into, and Ctrl-Z leaves the region set
until the program continues.

However this process ends, a small `sh` beside it sees the end of a pipe and gives the terminal back.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from typing import ClassVar

_PAINT_S = 0.125
_REPAINT_S = 2.0
"""Seconds after which all lines are painted again, because something may have erased them."""
_AWAY_S = 3.0
"""Seconds without a paint that mean that this program was stopped, and a shell has used the terminal meanwhile."""
_LAST_WORDS_S = 2.0
"""Seconds that `remove` waits for a terminal that has stalled."""
_LEAST_ROWS, _LEAST_COLUMNS = 10, 40
_CHUNK = 1800
"""Bytes of one write. A terminal takes up to 2048 at once; others may write between two writes."""

_SAVE, _RESTORE, _WHOLE_SCREEN = "\x1b7", "\x1b8", "\x1b[r"
_GIVE_BACK = f"{_SAVE}{_WHOLE_SCREEN}{_RESTORE}\x1b[J"
_GUARD = f"""
trap "" HUP INT QUIT TERM TSTP TTOU
IFS= read -r said || printf %s '{_GIVE_BACK}'
"""

Lines = Callable[[int, int], list[str]]
"""(width, rows at most) -> lines that fit the width. Called by the painting thread."""


def fits(fd: int) -> bool:
    """Return whether the terminal has room to spare for such lines."""
    try:
        size = os.get_terminal_size(fd)
    except OSError:  # no terminal
        return False
    return size.lines >= _LEAST_ROWS and size.columns >= _LEAST_COLUMNS


class Terminal:
    """Bottom of one terminal. Thread-safe. Lines of several callers stand one below the other."""

    _of_fd: ClassVar[weakref.WeakValueDictionary[int, Terminal]] = weakref.WeakValueDictionary()
    _lock_of_all: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._changed = threading.Condition()
        self._parts: list[Lines] = []
        self._painted: list[Lines] = []
        """Parts of the last paint."""
        self._shown: list[str] = []
        self._size = os.terminal_size((0, 0))
        self._height = 0
        self._painted_at = 0.0
        self._guard: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._looked_at = 0.0
        self._owner = os.getpid()

    @classmethod
    def at(cls, fd: int) -> Terminal:
        """Return the terminal of a descriptor; two pools share it."""
        with cls._lock_of_all:
            terminal = cls._of_fd.get(fd)
            if terminal is None or terminal._owner != os.getpid():
                terminal = cls._of_fd[fd] = Terminal(fd)
            return terminal

    def add(self, lines: Lines) -> None:
        """Show these lines, and ask for them about eight times a second, until they are removed."""
        with self._changed:
            self._parts.append(lines)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="skyward-console", daemon=True)
                self._thread.start()

    def remove(self, lines: Lines) -> None:
        """Remove lines, and give the terminal back after the last ones. Idempotent.

        A terminal that has stalled is given back once it continues, by the painting thread or by the guard.
        """
        with self._changed:
            if lines in self._parts:
                self._parts.remove(lines)
                self._changed.notify_all()
            if self._owner == os.getpid():
                self._changed.wait_for(lambda: lines not in self._painted or self._thread is None, _LAST_WORDS_S)

    # Painting -------------------------------------------------------------------------------------------------------
    # One thread paints, without the lock: the terminal may stall, and nobody else may wait for it then.

    def _run(self) -> None:
        while True:
            with self._changed:
                parts = list(self._parts)
            try:
                self._paint(parts)
            except Exception:  # a bug here, or a terminal that is gone, must cost no more than the view
                with contextlib.suppress(OSError):  # the terminal is gone
                    self._give_back()
                with self._changed:
                    self._parts.clear()
                    parts = []
            with self._changed:
                self._painted = parts
                self._changed.notify_all()
                if not parts and not self._parts:
                    self._thread = None
                    return
                self._changed.wait_for(lambda: self._parts != parts, _PAINT_S)  # noqa: B023  # called at once

    def _paint(self, parts: list[Lines]) -> None:
        if not parts:
            self._give_back()
            return
        now = time.monotonic()
        was_away = now - self._looked_at > _AWAY_S
        if not self._is_ours():
            return
        self._looked_at = now
        size = os.get_terminal_size(self._fd)
        if size.lines < _LEAST_ROWS or size.columns < _LEAST_COLUMNS:
            self._give_back()
            return
        most = max(3, size.lines // 3 // len(parts))
        # The last column stays free: writing there makes some terminals go to the next line.
        lines = [line for part in parts for line in part(size.columns - 1, most)][: size.lines - 4]
        if was_away or size != self._size or len(lines) != self._height:
            self._take(size, len(lines), has_moved=was_away or size != self._size)
        if now - self._painted_at > _REPAINT_S:
            self._shown, self._painted_at = [], now
        self._write_changes(lines)

    def _is_ours(self) -> bool:
        """Return whether this process is in the foreground; a stopped job must not paint over the shell."""
        try:
            return os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # not the controlling terminal of this process, so no shell uses it
            return True

    def _write_changes(self, lines: list[str]) -> None:
        first = self._size.lines - len(lines) + 1
        piece = ""
        for row, line in enumerate(lines):
            if row < len(self._shown) and self._shown[row] == line:
                continue
            painted = f"\x1b[{first + row};1H\x1b[0m{line}\x1b[K"
            if len((piece + painted).encode(errors="replace")) > _CHUNK:
                self._write(f"{_SAVE}{piece}{_RESTORE}")
                piece = ""
            piece += painted
        if piece:
            self._write(f"{_SAVE}{piece}{_RESTORE}")
        self._shown = lines

    def _take(self, size: os.terminal_size, height: int, *, has_moved: bool) -> None:
        """Make the rows above the last `height` the scrolling region, with the cursor in it."""
        if self._guard is None:
            self._guard = _start_guard(self._fd)
        sequence = ""
        if self._height:
            # The old lines may be anywhere below the cursor.
            sequence += _GIVE_BACK if has_moved else self._blanks()
        # Down and up again, in the same column: the screen scrolls if there is too little room.
        sequence += "\x1bD" * height + f"\x1b[{height}A"
        sequence += f"{_SAVE}\x1b[1;{size.lines - height}r{_RESTORE}"
        self._write(sequence)
        self._size, self._height, self._shown = size, height, []

    def _give_back(self) -> None:
        if self._height:
            same = os.get_terminal_size(self._fd) == self._size
            self._write(self._blanks() if same else _GIVE_BACK)
            self._height, self._shown = 0, []
        if self._guard is not None:
            guard, self._guard = self._guard, None
            _end_guard(guard)

    def _blanks(self) -> str:
        """Return the sequence that erases the lines and lets the whole screen scroll again."""
        first = self._size.lines - self._height + 1
        rows = "".join(f"\x1b[{row};1H\x1b[0m\x1b[K" for row in range(first, self._size.lines + 1))
        return f"{_SAVE}{_WHOLE_SCREEN}{rows}{_RESTORE}"

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # the program has made the terminal non-blocking
                time.sleep(0.01)

    def forget_in_child(self) -> None:
        """Forget the terminal and its guard in a forked child: both are the parent's."""
        self._parts, self._painted, self._height, self._thread = [], [], 0, None
        self._changed = threading.Condition()
        guard, self._guard = self._guard, None
        if guard is not None and guard.stdin is not None:
            with contextlib.suppress(OSError):  # closed already
                os.close(guard.stdin.fileno())  # otherwise the guard would not see the end of the parent


def _start_guard(fd: int) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=fd,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # it must survive a Ctrl-C, and a kill of this process group
        )
    except OSError:  # no process can be started: this one gives the terminal back alone
        return None


def _end_guard(guard: subprocess.Popen[bytes]) -> None:
    assert guard.stdin is not None
    with contextlib.suppress(OSError):  # it has died already
        guard.stdin.write(b"done\n")
        guard.stdin.close()
    try:
        guard.wait(2)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def _forget_in_child() -> None:
    for terminal in list(Terminal._of_fd.values()):
        terminal.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
