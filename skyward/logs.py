"""How the output of calls is shown or kept here: one line as it comes, with its origin."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import OrderedDict
from typing import TextIO

from .errors import UsageError
from .machine import LogLine, LogSink
from .ownership import check_path

__all__ = ["LogFiles", "printer"]

_MAX_OPEN = 64
"""Files that are held open; a gang of a thousand ranks has more."""
_LONGEST_NAME = 80


def printer() -> LogSink:
    """A sink that writes to this process's sys.stdout and sys.stderr of the moment (a notebook replaces them)."""

    def show(line: LogLine) -> None:
        origin = f"node {line.node}" if line.rank is None else f"node {line.node} rank {line.rank}"
        stream = sys.stdout if line.stream == "stdout" else sys.stderr
        try:
            begin, end = ("\x1b[2m", "\x1b[0m") if shows_colour(stream) else ("", "")
            stream.write(f"{begin}[{origin}]{end} {line.text}\n")
            stream.flush()
        except (OSError, ValueError, AttributeError):
            return  # closed by the user; there is nowhere to say so

    return show


def shows_colour(stream: TextIO) -> bool:
    """Whether it is a terminal that shows faint text as such, and nobody said no (see no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in ("", "dumb"):
        return False
    return stream.isatty()


class LogFiles:
    """Keeps the output of calls in files, one for each rank of a gang: `ComputePool(..., logs=sky.LogFiles("logs"))`.

        logs/train-3/rank-0.log              what rank 0 of call 3, `train`, wrote; both streams, as the lines came
        logs/train-3/rank-0.restart-1.log    the same rank, after the gang was started again
        logs/node-0.log                      what plain calls wrote on node 0, each line with the call's name

    Files are appended to, and made with their folders when there is something to write. Thread-safe. The pool closes
    them; a line that comes later opens its file again.

    Args:
        folder: where; relative to the working folder of this moment.
        echo: whether the lines are printed here too, as they are with `logs=True`.

    Example:
        >>> LogFiles("logs", echo=False)
        LogFiles('logs', echo=False)
    """

    def __init__(self, folder: str | os.PathLike[str], *, echo: bool = True) -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise UsageError(f"folder: {folder!r}; it is the path of a folder")
        self._given = os.fspath(folder)
        self._folder = os.path.abspath(os.path.expanduser(folder))
        self._echo = printer() if echo else None
        self._files: OrderedDict[str, TextIO] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, line: LogLine) -> None:
        text = line.text if line.rank is not None else f"[{line.task}] {line.text}"
        with self._lock:
            file = self._file(self.path(line))
            file.write(f"{text}\n")
            file.flush()
        if self._echo is not None:
            self._echo(line)

    def path(self, line: LogLine) -> str:
        """Of the file that the line goes to."""
        if line.rank is None:
            return os.path.join(self._folder, f"node-{line.node}.log")
        again = f".restart-{line.restart_count}" if line.restart_count else ""
        name = re.sub(r"[^\w.-]+", "_", line.task)[:_LONGEST_NAME]
        return os.path.join(self._folder, f"{name}-{line.call}", f"rank-{line.rank}{again}.log")

    def _file(self, path: str) -> TextIO:
        file = self._files.get(path)
        if file is None:
            check_path(path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = self._files[path] = open(path, "a", encoding="utf-8", errors="replace")  # noqa: SIM115  # see close
            if len(self._files) > _MAX_OPEN:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(path)
        return file

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()

    def __repr__(self) -> str:
        return f"LogFiles({self._given!r}, echo={self._echo is not None})"
