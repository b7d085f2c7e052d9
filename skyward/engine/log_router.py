"""Output on its way to the user: pieces of text become whole lines with their origin."""

from __future__ import annotations

import codecs
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..console.logs import LogLines
from ..core.printable import coloured
from ..values.machine import LogLine
from .tasks import Task

__all__ = ["LogRouter"]

_STREAMS = ("stdout", "stderr")
_LONGEST = 64 * 1024
"""Characters after which a line without an end is shown all the same."""
_PROGRESS_S = 1.0
"""Seconds between two states of a progress bar (a line that is overwritten by carriage returns)."""


_TIMES = re.compile(r"\[[^][]*\]\s*$")
"""What stands in brackets at the end of tqdm's bars."""


class _Key(NamedTuple):
    """Where output comes from; its lines are put together apart from all other's."""

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
    """A line that has not ended."""

    text: str = ""
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    shown_at: float = 0.0
    shown: str = ""
    """The state of a progress bar that was shown last."""


class LogRouter:
    """Puts lines together for each (node, task, stream) and queues them in `lines`; keeps the tail for errors.

    Called under the engine's lock, so it waits for nothing. Of each line only text and colours are left, and `mask` is
    applied to it.
    """

    def __init__(self, lines: LogLines | None, mask: Callable[[str], str] | None = None) -> None:
        self._sink = lines
        self._mask = mask
        self._partial: dict[_Key, _Partial] = {}
        self._lock = threading.Lock()

    def add(self, node: int, task: Task | None, stream: int, text: bytes) -> None:
        key = _key(task, node, stream)
        with self._lock:
            lines = self._lines(key, text)
        for line in lines:
            self._emit(key, line, task)

    def _lines(self, key: _Key, text: bytes) -> list[str]:
        """The lines that `text` completes; the rest is kept."""
        partial = self._partial.pop(key, None) or _Partial()
        *lines, rest = (partial.text + partial.decoder.decode(text)).split("\n")
        lines = [_overwritten(line.removesuffix("\r")) for line in lines]
        if lines and partial.shown:
            if _is_same_state(lines[0], partial.shown):
                del lines[0]
            partial.shown = ""
        if "\r" in rest:
            rest = _overwritten(rest.removesuffix("\r"))
            now = time.monotonic()
            is_new = not (partial.shown and _is_same_state(rest, partial.shown))
            if rest and is_new and now - partial.shown_at >= _PROGRESS_S:
                lines.append(rest)
                partial.shown, partial.shown_at = rest, now
                rest = ""
        if len(rest) > _LONGEST:
            lines.append(rest)
            rest = ""
        partial.text = rest
        self._partial[key] = partial
        return lines

    def end(self, task: Task) -> None:
        """The task has ended: a last line without its newline counts."""
        if not self._partial:
            return
        with self._lock:
            ended = [key for key in self._partial if key.task == task.id]
            rests = [(key, self._partial.pop(key)) for key in ended]
        for key, rest in rests:
            if rest.text and not (rest.shown and _is_same_state(rest.text, rest.shown)):
                self._emit(key, rest.text, task)

    def say(self, task: Task, node: int, text: str) -> None:
        """Something of ours about the task, as if it had written it to standard error."""
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

    def _emit(self, key: _Key, text: str, task: Task | None) -> None:
        text = coloured(text)
        if self._mask is not None:
            text = self._mask(text)
        if task is not None:
            task.keep_line(text + "\n")
        if self._sink is None:
            return
        line = LogLine(
            text=text,
            stream=_STREAMS[key.stream & 1],
            node=key.node,
            rank=key.rank,
            task=key.name,
            call=key.call[0],
            restart_count=key.call[1],
        )
        shown = self._sink.put(line)
        if task is not None:
            task.shown = shown


def _is_same_state(line: str, shown: str) -> bool:
    """Whether the last state of a progress bar was shown already, but for its time and rate: tqdm writes it twice."""
    return not line or _TIMES.sub("", line) == _TIMES.sub("", shown)


def _overwritten(line: str) -> str:
    """What a terminal shows of a line with carriage returns: its last state."""
    return line.rpartition("\r")[2]
