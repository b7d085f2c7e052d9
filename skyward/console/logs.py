"""Output of calls on this side: each line is printed or kept as it comes, with its origin."""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TextIO

from ..core.ownership import check_path
from ..core.signatures import checked_options
from ..errors import UsageError
from ..values.machine import LogLine, LogSink
from .displays import DisplayLine, show_in_notebook
from .outlet import Outlet, write_text
from .shell import is_notebook
from .style import Style, has_many_colours

_MAX_OPEN = 64
"""Open files at most; a gang of a thousand ranks has more."""
_LONGEST_NAME = 80


class Part(enum.Enum):
    """Kinds of lines. A progress bar is one line that its task overwrites."""

    LINE = "line"
    STATE = "state of a progress bar"
    LAST_STATE = "last state of a progress bar, which was shown already"


class LogLines:
    """Sinks of the lines of a pool's calls. Each has an outlet of its own, so a sink that stalls delays no other.

    Args:
        logs: as `ComputePool` takes it, but not False.
        others: further sinks, such as the file that `skyward logs` reads.
    """

    def __init__(self, logs: bool | LogSink, *others: LogSink) -> None:
        self.shows_progress: Callable[[], bool] = bool
        """Whether a console shows the states of progress bars in place now, so that they need not be printed."""
        self.before_printing: Callable[[], object] = bool
        """Called before lines are printed, by the thread that prints."""
        sinks: list[Outlet[LogLine]] = []
        if type(logs) is LogFiles:  # not a subclass, whose `__call__` may be its own
            sinks.append(_outlet(_each(logs.keep)))
        elif callable(logs):
            sinks.append(_outlet(_each(logs), batch=1))
        if logs is True or (type(logs) is LogFiles and logs.echoes):
            self._printed: Outlet[LogLine] | None = _outlet(self._print)
        else:
            self._printed = None
        self._outlets = [*sinks, *(_outlet(_each(other)) for other in others)]

    def put(self, line: LogLine, part: Part = Part.LINE) -> Callable[[], None]:
        """Queue a line without waiting. Returns a function that waits until it was written, or its reader stalls.

        A display goes to the printer as a whole, and to all others as lines of text.
        """
        if isinstance(line, DisplayLine):
            written = [partial(outlet.wait, outlet.put(row)) for row in line.rows() for outlet in self._outlets]
            if self._printed is not None:
                written.append(partial(self._printed.wait, self._printed.put(line)))
            return partial(_wait_for, written)
        outlets = [*self._outlets] if part is not Part.LAST_STATE else []
        # A state is printed, or shown in place. In the second case its last one is printed, so that it stays.
        is_in_place = part is not Part.LINE and self.shows_progress()
        if self._printed is not None and is_in_place is (part is Part.LAST_STATE):
            outlets.append(self._printed)
        return partial(_wait_for, [partial(outlet.wait, outlet.put(line)) for outlet in outlets])

    def _print(self, lines: list[LogLine]) -> None:
        self.before_printing()
        print_lines(lines)

    def flush(self) -> None:
        """Wait until every line was written, or until a reader has stalled for a while."""
        for outlet in [*self._outlets, *filter(None, [self._printed])]:
            outlet.flush()


def _wait_for(written: Sequence[Callable[[], object]]) -> None:
    for is_written in written:
        is_written()


def _outlet(sink: Callable[[list[LogLine]], object], **how: int) -> Outlet[LogLine]:
    return Outlet(sink, size=_size, dropped=_dropped, label="the function given as logs=", **how)


def _size(line: LogLine) -> int:
    return len(line.text) + (line.display.size if isinstance(line, DisplayLine) else 0)


def _dropped(count: int, oldest: LogLine) -> LogLine:
    text = f"[skyward: {count} lines of output were dropped here: they came faster than they were read]"
    if isinstance(oldest, DisplayLine):
        oldest = oldest.rows()[0]
    return replace(oldest, text=text, stream="stderr")


def _each(sink: LogSink) -> Callable[[list[LogLine]], None]:
    def take(lines: list[LogLine]) -> None:
        for line in lines:
            sink(line)

    return take


def print_lines(lines: list[LogLine]) -> None:
    """Write to the present sys.stdout and sys.stderr, which a notebook or a test may have replaced."""
    for (name, is_display), group in itertools.groupby(lines, lambda line: (line.stream, type(line) is DisplayLine)):
        stream = sys.stdout if name == "stdout" else sys.stderr
        has_colour = shows_colour(stream)
        style = Style(has_colour=has_colour, has_many_colours=has_colour and has_many_colours())
        if is_display and is_notebook():
            for line in group:
                assert isinstance(line, DisplayLine)
                show_in_notebook(line, _origin(line, style), partial(write_text, stream))
        else:
            rows = [row for line in group for row in (line.rows() if isinstance(line, DisplayLine) else [line])]
            write_text(stream, "".join(f"{_origin(row, style)} {row.text}\n" for row in rows))


def _origin(line: LogLine, style: Style) -> str:
    origin = f"node {line.node}" if line.rank is None else f"node {line.node} rank {line.rank}"
    return style.paint_node(f"[{origin}]", line.node)


def shows_colour(stream: TextIO | None) -> bool:
    """Return whether the stream is a terminal with colours, and NO_COLOR is not set (see no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in ("", "dumb"):
        return False
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError, AttributeError):  # closed by the user
        return False


@checked_options
class LogFiles:
    """Keep the output of calls in files, one for each rank of a gang: `ComputePool(..., logs=sky.LogFiles("logs"))`.

        logs/train-3/rank-0.log              both streams of rank 0 of call 3, `train`, in the order of the lines
        logs/train-3/rank-0.restart-1.log    the same rank, after the gang was restarted
        logs/node-0.log                      output of plain calls on node 0, each line with the name of its call

    Lines are appended. A file and its folders are created with its first line. Thread-safe. The pool closes the
    files; a later line opens its file again.

    Args:
        folder: path of the folder; a relative one starts at the present working folder.
        echo: whether the lines are printed as well, as with `logs=True`.

    Raises:
        UsageError: `folder` is not a path.

    Example:
        >>> LogFiles("logs", echo=False)
        LogFiles('logs', echo=False)
    """

    def __init__(self, folder: str | os.PathLike[str], *, echo: bool = True) -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise UsageError(f"folder={folder!r}: must be a path; pass the path of a folder, such as 'logs'")
        self._given = os.fspath(folder)
        self._folder = os.path.abspath(os.path.expanduser(folder))
        self.echoes = echo
        self._files: OrderedDict[str, TextIO] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, line: LogLine) -> None:
        """Keep a line, and print it if `echo` is set."""
        self.keep(line)
        if self.echoes:
            print_lines([line])

    def keep(self, line: LogLine) -> None:
        """Write a line to its file."""
        text = line.text if line.rank is not None else f"[{line.task}] {line.text}"
        with self._lock:
            file = self._file(self.path(line))
            file.write(f"{text}\n")
            file.flush()

    def path(self, line: LogLine) -> str:
        """Return the path of the file that a line belongs to."""
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
        """Close the files. Idempotent."""
        with self._lock:
            while self._files:
                with contextlib.suppress(OSError):  # the disk is full; the failed write was reported before
                    self._files.popitem()[1].close()

    def __repr__(self) -> str:
        return f"LogFiles({self._given!r}, echo={self.echoes})"
