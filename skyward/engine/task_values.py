"""Values that running tasks may name: those among their arguments, and those that they made or got references to.

A task refers to a blob of such a value by its name, in the arguments of its calls and in its own value. So the bytes
never pass through the task. The client holds what a task has references to until the task has forgotten them or has
ended, however it ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..wire.blobs import Blob
from .kept_values import KeptBlob
from .ledger import Ledger
from .task_dispatcher import TaskDispatcher


class TaskValues:
    """Values that tasks have references to. Used under the ledger's lock."""

    def __init__(self, ledger: Ledger, dispatcher: TaskDispatcher) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._held: dict[int, dict[int, tuple[KeptBlob, ...]]] = {}
        """Blobs of references by task, and by the number of the call whose outcome had them."""
        self._tasks: dict[int, int] = {}
        """Task by number of the call."""

    def on_up(self, node: int) -> None:
        """Let the values of tasks on a node name blobs."""
        self._ledger.links[node].named_by = self.named

    def hold(self, task: int, call: int, blobs: Iterable[KeptBlob]) -> None:
        """Hold the blobs of an outcome for the task that gets it."""
        self._held.setdefault(task, {})[call] = tuple(blobs)
        self._tasks[call] = task
        self._dispatcher.on_ended[task].add(self._ended)

    def release(self, call: int) -> None:
        """Forget an outcome that its task has forgotten."""
        task = self._tasks.pop(call, None)
        if task is None:
            return
        del self._held[task][call]
        if not self._held[task]:
            del self._held[task]

    def _ended(self, task: int) -> None:
        for call in self._held.pop(task, ()):
            del self._tasks[call]

    def named(self, task: int, digest: bytes) -> Blob | None:
        """Return a blob that a task may name."""
        for blobs in self._held.get(task, {}).values():
            for blob in blobs:
                if blob.digest == digest:
                    return blob
        record = self._ledger.tasks.get(task)
        return None if record is None else next((b for b in record.payload.blobs if b.digest == digest), None)
