"""Streams to and from running tasks: items, credit, and the end of either side."""

from __future__ import annotations

from ..errors import PoolClosed
from ..wire.frames import FrameKind
from ..wire.payloads import Encoded
from .ledger import Ledger
from .task_dispatcher import TaskDispatcher
from .tasks import StreamTask


class OpenStreams:
    """Input, credit and end of the streams of running tasks. Thread-safe."""

    tells_each_item = False

    def __init__(self, ledger: Ledger, dispatcher: TaskDispatcher) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher

    def grant(self, task_id: int, count: int) -> None:
        """Let a generator yield `count` more items. Do nothing if the task has ended."""
        with self._ledger:
            node = self._ledger.node_of(self._ledger.tasks.get(task_id))
            if node is not None:
                self._ledger.tell(node, FrameKind.CREDIT, task_id, count.to_bytes(4, "little"))

    def send_item(self, task_id: int, lane: int, item: Encoded) -> None:
        """Send an item of an input iterator. Do nothing if the task has ended."""
        with self._ledger:
            node = self._ledger.node_of(self._ledger.tasks.get(task_id))
            if node is None:
                return
            link = self._ledger.links.get(node)
            if link is None:
                return
            link.send_stream_item(task_id, lane, item)
            self._ledger.dirty.add(link)

    def end_input(self, task_id: int, kind: int, lane: int, why: str = "") -> None:
        """Report to a task that its input iterator has ended (`kind` is IN_END) or raised (IN_ERROR).

        `why` says it if the client cannot.
        """
        with self._ledger:
            node = self._ledger.node_of(self._ledger.tasks.get(task_id))
            if node is not None and node in self._ledger.links:
                self._ledger.links[node].end_stream(kind, task_id, lane, why)
                self._ledger.dirty.add(self._ledger.links[node])

    def close(self, task_id: int) -> None:
        """Close a generator whose reader is gone. Forget it if it was not sent yet."""
        with self._ledger:
            task = self._ledger.tasks.get(task_id)
            if task is None:
                return
            task.is_cancelled = True
            self._ledger.idle.notify_all()
            node = self._dispatcher.take_back(task)
            if node is None:
                self._dispatcher.forget(task)
            else:
                self._ledger.tell(node, FrameKind.CLOSE, task_id)

    def stop(self, task_id: int) -> None:
        """Close a stream that nobody reads, or cancel any other task."""
        with self._ledger:
            if isinstance(self._ledger.tasks.get(task_id), StreamTask):
                self.close(task_id)
            else:
                self._dispatcher.cancel(task_id)

    def close_all(self) -> None:
        """Close all generators, because nobody may ever read them to their end. Their readers get PoolClosed."""
        with self._ledger:
            streams = [task for task in self._ledger.tasks.values() if isinstance(task, StreamTask)]
        for task in streams:
            problem = f"{task.name!r}: the pool was closed before the generator was read to its end"
            task.on_failed(PoolClosed(f"{problem}; read it inside the `with` block"))
            self.close(task.id)
