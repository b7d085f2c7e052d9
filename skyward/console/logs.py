"""How the output of calls is shown or kept here: one line as it comes, with its origin."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TextIO

from ..core.ownership import check_path
from ..core.signatures import checked_options
from ..errors import UsageError
from ..values.machine import LogLine, LogSink
from .outlet import Outlet, write_text

__all__ = ["LogLines", "LogFiles", "print_lines", "shows_colour"]

_MAX_OPEN = 64
"""Files that are held open; a gang of a thousand ranks has more."""
_LONGEST_NAME = 80


class LogLines:
    """Where the lines of a pool's calls go. Each sink has an outlet, so one that stalls holds up nothing else."""

    def __init__(self, logs: bool | LogSink, *others: LogSink) -> None:
        """`logs` as `ComputePool` takes it, not False; `others`: further sinks of ours."""
        sinks: list[Outlet[LogLine]] = []
        if type(logs) is LogFiles:  # not a subclass, whose `__call__` may be its own
            sinks.append(_outlet(_each(logs.keep)))
        elif callable(logs):
            sinks.append(_outlet(_each(logs), batch=1))
        if logs is True or (type(logs) is LogFiles and logs.echoes):
            sinks.append(_outlet(print_lines))
        self._outlets = [*sinks, *(_outlet(_each(other)) for other in others)]

    def put(self, line: LogLine) -> Callable[[], None]:
        """Queue a line without waiting. What this returns waits until the line was written, or its reader stalls."""
        written = [partial(outlet.wait, outlet.put(line)) for outlet in self._outlets]

        def wait() -> None:
            for is_written in written:
                is_written()

        return wait

    def flush(self) -> None:
        """Wait until every line was written; not for long where a reader has stalled."""
        for outlet in self._outlets:
            outlet.flush()


def _outlet(sink: Callable[[list[LogLine]], object], **how: int) -> Outlet[LogLine]:
    return Outlet(sink, size=lambda line: len(line.text), dropped=_dropped, label="the function given as logs=", **how)


def _dropped(count: int, oldest: LogLine) -> LogLine:
    text = f"[skyward: {count} lines of output were dropped here: they came faster than they were read]"
    return replace(oldest, text=text, stream="stderr")


def _each(sink: LogSink) -> Callable[[list[LogLine]], None]:
    def take(lines: list[LogLine]) -> None:
        for line in lines:
            sink(line)

    return take


def print_lines(lines: list[LogLine]) -> None:
    """Write to this process's sys.stdout and sys.stderr of the moment, which a notebook or a test replaces."""
    for name, group in itertools.groupby(lines, lambda line: line.stream):
        stream = sys.stdout if name == "stdout" else sys.stderr
        has_colour = shows_colour(stream)
        write_text(stream, "".join(_shown(line, has_colour) for line in group))


def _shown(line: LogLine, has_colour: bool) -> str:
    origin = f"node {line.node}" if line.rank is None else f"node {line.node} rank {line.rank}"
    begin, end = ("\x1b[2m", "\x1b[0m") if has_colour else ("", "")
    return f"{begin}[{origin}]{end} {line.text}\n"


def shows_colour(stream: TextIO | None) -> bool:
    """Whether it is a terminal that shows faint text as such, and nobody said no (see no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in ("", "dumb"):
        return False
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError, AttributeError):  # closed by the user
        return False


@checked_options
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
        self.echoes = echo
        self._files: OrderedDict[str, TextIO] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, line: LogLine) -> None:
        """Keep the line, and print it if `echo`."""
        self.keep(line)
        if self.echoes:
            print_lines([line])

    def keep(self, line: LogLine) -> None:
        """Write the line to its file."""
        text = line.text if line.rank is not None else f"[{line.task}] {line.text}"
        with self._lock:
            file = self._file(self.path(line))
            file.write(f"{text}\n")
            file.flush()

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
                with contextlib.suppress(OSError):  # the disk is full: the write that failed was reported
                    self._files.popitem()[1].close()

    def __repr__(self) -> str:
        return f"LogFiles({self._given!r}, echo={self.echoes})"
