"""Output on its way to the user: pieces of text become whole lines with their origin."""

from __future__ import annotations

import threading

from ..machine import LogLine, LogSink
from .tasks import Task

__all__ = ["LogRouter"]

_STREAMS = ("stdout", "stderr")


class LogRouter:
    """Puts lines together for each (node, task, stream) and hands them to the sink; keeps the tail for errors.

    Called by the I/O thread under the engine's lock; a sink must not call back into the pool.
    """

    def __init__(self, sink: LogSink | None) -> None:
        self._sink = sink
        self._partial: dict[tuple[int, int, int, int | None, str], str] = {}
        self._lock = threading.Lock()

    def add(self, node: int, task: Task | None, stream: int, text: bytes) -> None:
        key = (task.id if task else 0, node, stream, task.rank if task else None, task.name if task else "")
        with self._lock:
            whole, newline, rest = (self._partial.pop(key, "") + text.decode(errors="replace")).rpartition("\n")
            if rest:
                self._partial[key] = rest
        if newline:
            for line in whole.split("\n"):
                self._emit(key, line, task)

    def end(self, task: Task) -> None:
        """The task has ended: a last line without its newline counts."""
        if not self._partial:
            return
        with self._lock:
            ended = [key for key in self._partial if key[0] == task.id]
            rests = [(key, self._partial.pop(key)) for key in ended]
        for key, rest in rests:
            self._emit(key, rest, task)

    def flush(self) -> None:
        with self._lock:
            rests = list(self._partial.items())
            self._partial.clear()
        for key, rest in rests:
            self._emit(key, rest, None)

    def _emit(self, key: tuple[int, int, int, int | None, str], text: str, task: Task | None) -> None:
        if task is not None:
            task.tail.append(text + "\n")
        if self._sink is not None:
            _, node, stream, rank, name = key
            self._sink(LogLine(text=text, stream=_STREAMS[stream & 1], node=node, rank=rank, task=name))
