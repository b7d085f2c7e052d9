"""Streams to and from running tasks: items, credit, and the end of either side."""

from __future__ import annotations

from ..errors import PoolClosed
from ..wire.frames import Kind
from ..wire.payloads import Encoded
from .ledger import Books
from .task_sender import Sending
from .tasks import StreamTask

__all__ = ["OpenStreams"]


class OpenStreams:
    """Feed, grant and close the streams of running tasks. Thread-safe."""

    def __init__(self, books: Books, sending: Sending) -> None:
        self._books = books
        self._sending = sending

    def grant(self, task_id: int, count: int) -> None:
        """Let a generator yield `count` more items. Does nothing if the task has ended."""
        with self._books:
            node = self._books.scheduler.node_of(task_id)
            if node is not None:
                self._books.tell(node, Kind.CREDIT, task_id, count.to_bytes(4, "little"))

    def send_item(self, task_id: int, lane: int, item: Encoded) -> None:
        """Send an item of an input iterator. Does nothing if the task has ended."""
        with self._books:
            node = self._books.scheduler.node_of(task_id)
            if node is None:
                return
            link = self._books.links.get(node)
            if link is None:
                return
            link.send_stream_item(task_id, lane, item)
            self._books.dirty.add(link)

    def end_input(self, task_id: int, kind: int, lane: int) -> None:
        """Tell a task that its input iterator has ended (IN_END) or raised (IN_ERROR)."""
        with self._books:
            node = self._books.scheduler.node_of(task_id)
            if node is not None and node in self._books.links:
                self._books.links[node].end_stream(kind, task_id, lane)
                self._books.dirty.add(self._books.links[node])

    def close(self, task_id: int) -> None:
        """Close a generator whose reader is gone, or forget it if it was not sent yet."""
        with self._books:
            task = self._books.tasks.get(task_id)
            if task is None:
                return
            task.is_cancelled = True
            self._books.idle.notify_all()
            node = self._books.scheduler.cancel(task_id)
            if node is None:
                self._sending.forget(task)
            else:
                self._books.tell(node, Kind.CLOSE, task_id)

    def stop(self, task_id: int) -> None:
        """Close a stream that nobody reads, or cancel any other task."""
        with self._books:
            if isinstance(self._books.tasks.get(task_id), StreamTask):
                self.close(task_id)
            else:
                self._sending.cancel(task_id)

    def close_all(self) -> None:
        """Close all generators, which nobody may ever read to their end. Their readers get PoolClosed."""
        with self._books.lock:
            streams = [task for task in self._books.tasks.values() if isinstance(task, StreamTask)]
        for task in streams:
            task.on_failed(PoolClosed(f"the pool was closed before {task.name!r} was read to its end"))
            self.close(task.id)
