"""Output on its way to the user: pieces of text become whole lines with their origin."""

from __future__ import annotations

import codecs
import re
import threading
import time
from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..console.displays import DisplayLine
from ..console.logs import Part
from ..core.printable import coloured, printable_lines
from ..core.records import dataclass
from ..values.machine import LogLine
from ..wire.displays import DisplayJoiner
from .tasks import Task

_STREAMS = ("stdout", "stderr")
_LONGEST = 64 * 1024
"""Length in characters from which a line is shown before its end."""
_PROGRESS_S = 1.0
"""Seconds between two states of a progress bar, which is a line that carriage returns overwrite."""


_TIMES = re.compile(r"\[[^][]*\]\s*$")
"""Time and rate in brackets at the end of tqdm's bars."""


class _Key(NamedTuple):
    """Origin of output. Lines are assembled separately for each origin."""

    task: int
    node: int
    stream: int
    rank: int | None
    name: str
    call: tuple[int, int]


def _key(task: Task | None, node: int, stream: int) -> _Key:
    if task is None:
        return _Key(0, node, stream, None, "", (0, 0))
    return _Key(task.id, node, stream, task.rank, task.name, task.call)


@dataclass
class _Partial:
    """Line without its end."""

    text: str = ""
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    shown_at: float = 0.0
    shown: str = ""
    """State of a progress bar that was shown last."""
    progress: str = ""
    """Current state of a progress bar."""


if TYPE_CHECKING:  # a protocol takes memory in every client

    class LineSink(Protocol):
        """Destination of lines. It never waits."""

        def put(self, line: LogLine, part: Part = Part.LINE) -> Callable[[], None]:
            """Take a line. Returns a function that waits until it was shown."""
            ...


class LogRouter:
    """Assembler of lines for each (node, task, stream). It queues them in `lines` and keeps the tail for errors.

    Called under the ledger's lock, so it never waits. It removes control sequences except colours, and applies `mask`
    to each line.
    """

    def __init__(self, lines: LineSink | None, mask: Callable[[str], str] | None = None) -> None:
        self._sink = lines
        self._mask = mask
        self._partial: dict[_Key, _Partial] = {}
        self._displays = DisplayJoiner()
        # Protects the table only, which `progress` reads from other threads. Lines keep their order although they are
        # emitted without it, because the ledger's lock lets one thread at a time call the rest.
        self._lock = threading.Lock()

    def add(self, node: int, task: Task | None, stream: int, text: bytes) -> None:
        key = _key(task, node, stream)
        with self._lock:
            lines = self._lines(key, text)
        for line, part in lines:
            self._emit(key, line, task, part)

    def _lines(self, key: _Key, text: bytes) -> list[tuple[str, Part]]:
        """Return the lines that `text` completes, and keep the rest."""
        partial = self._partial.pop(key, None) or _Partial()
        *ended, rest = (partial.text + partial.decoder.decode(text)).split("\n")
        lines: list[tuple[str, Part]] = [(_overwritten(line.removesuffix("\r")), Part.LINE) for line in ended]
        if lines:
            if partial.shown and _is_same_state(lines[0][0], partial.shown):
                lines[0] = lines[0][0] or partial.shown, Part.LAST_STATE
            partial.shown = partial.progress = ""
        if "\r" in rest:
            rest = _overwritten(rest.removesuffix("\r"))
            partial.progress = rest or partial.progress
            now = time.monotonic()
            is_new = not (partial.shown and _is_same_state(rest, partial.shown))
            if rest and is_new and now - partial.shown_at >= _PROGRESS_S:
                lines.append((rest, Part.STATE))
                partial.shown, partial.shown_at = rest, now
                rest = ""
        if len(rest) > _LONGEST:
            lines.append((rest, Part.LINE))
            rest = ""
        partial.text = rest
        self._partial[key] = partial
        return lines

    def add_display(self, node: int, task: Task | None, piece: bytes) -> None:
        """Take a piece of a display. The display comes behind the lines before it, even if one has no end yet."""
        display = self._displays.add(node, piece)
        if display is None:
            return
        if self._mask is not None:
            display = display.masked(self._mask)
        with self._lock:
            before = [(key, rest) for key in self._keys(task, node) for rest in self._lines_so_far(key)]
        for key, line in before:
            self._emit(key, line, task)
        key = _key(task, node, 0)
        text = "\n".join(map(coloured, display.text.splitlines()))
        if task is not None:
            task.keep_line(text + "\n")
        if self._sink is not None:
            self._shown(task, self._sink.put(DisplayLine(display=display, **_origin(key, text))))

    def _keys(self, task: Task | None, node: int) -> list[_Key]:
        return [_key(task, node, stream) for stream in range(len(_STREAMS))]

    def _lines_so_far(self, key: _Key) -> list[str]:
        """Take the line without its end, unless it is a progress bar."""
        partial = self._partial.get(key)
        if partial is None or partial.progress or not partial.text:
            return []
        text, partial.text = partial.text, ""
        return [text]

    def end(self, task: Task) -> None:
        """Emit the last lines of a task that has ended, even without a newline."""
        if not self._partial:
            return
        with self._lock:
            ended = [key for key in self._partial if key.task == task.id]
            rests = [(key, self._partial.pop(key)) for key in ended]
        for key, rest in rests:
            if rest.shown and _is_same_state(rest.text, rest.shown):
                self._emit(key, rest.text or rest.shown, task, Part.LAST_STATE)
            elif rest.text:
                self._emit(key, rest.text, task)

    def progress(self) -> dict[int, str]:
        """Return the progress lines that are shown now, by task."""
        with self._lock:
            states = {key.task: partial.progress for key, partial in self._partial.items() if partial.progress}
        mask = self._mask or str
        return {task: mask(printable_lines(state)) for task, state in states.items()}

    def say(self, task: Task, node: int, text: str) -> None:
        """Emit a message of skyward about a task, as if the task had written it to standard error."""
        key = _key(task, node, 1)
        for line in text.splitlines():
            self._emit(key, f"skyward: {line}", None)

    def flush(self) -> None:
        with self._lock:
            rests = [(key, partial.text) for key, partial in self._partial.items()]
            self._partial.clear()
        for key, rest in rests:
            if rest:
                self._emit(key, rest, None)

    def _emit(self, key: _Key, text: str, task: Task | None, part: Part = Part.LINE) -> None:
        text = coloured(text)
        if self._mask is not None:
            text = self._mask(text)
        if task is not None and part is not Part.LAST_STATE:
            task.keep_line(text + "\n")
        if self._sink is None:
            return
        self._shown(task, self._sink.put(LogLine(**_origin(key, text)), part))

    def _shown(self, task: Task | None, wait: Callable[[], None]) -> None:
        if task is not None:
            task.shown = wait


def _origin(key: _Key, text: str) -> dict[str, Any]:
    """Return the fields of a LogLine."""
    return {
        "text": text,
        "stream": _STREAMS[key.stream & 1],
        "node": key.node,
        "rank": key.rank,
        "task": key.name,
        "call": key.call[0],
        "restart_count": key.call[1],
    }


def _is_same_state(line: str, shown: str) -> bool:
    """Tell whether a state of a progress bar was shown before, apart from time and rate. tqdm writes the last twice."""
    return not line or _TIMES.sub("", line) == _TIMES.sub("", shown)


def _overwritten(line: str) -> str:
    """Return the last state of a line with carriage returns, which is the one that a terminal shows."""
    return line.rpartition("\r")[2]
