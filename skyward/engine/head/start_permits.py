"""Permissions of calls to begin beside the head before their client knows of that; see `start_gate`.

A call that begins at once keeps its permission, and is in doubt if the head is lost with its node. One that has waited
loses it, and the client is told, so that it knows that such a call has not begun. The call begins a round trip later,
which is little against the time that it has waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class _Permitted(Protocol):
    """Task of a call."""

    attempt: int
    actor: int
    is_permitted: bool


class StartPermits:
    """Permissions of the client's calls. Used under the ledger's lock.

    Args:
        find: Returns the task of a call; None: it has ended.
        tell: Tells the client calls that are not permitted anymore.
    """

    def __init__(self, find: Callable[[int], _Permitted | None], tell: Callable[[list[int]], object]) -> None:
        self._find = find
        self._tell = tell
        self._given: set[int] = set()
        """Calls that have no task yet."""
        self._new: set[int] = set()
        """Calls that have had one since the last look."""
        self._waited: set[int] = set()
        """Calls that waited then."""

    def give(self, call: int) -> None:
        """Note that the client permits a call."""
        self._given.add(call)

    def take(self, call: int) -> bool:
        """Return whether the client permits a call, which has a task now."""
        if call not in self._given:
            return False
        self._given.remove(call)
        self._new.add(call)
        return True

    def recall(self) -> None:
        """Take the permission from the calls that have waited since the last time."""
        waiting = self._waiting_of(self._waited)
        self._waited, self._new = set(self._waiting_of(self._new)), set()
        for task in waiting.values():
            task.is_permitted = False
        if waiting:
            self._tell(list(waiting))

    def _waiting_of(self, calls: Iterable[int]) -> dict[int, _Permitted]:
        """Return the tasks of those calls that were never sent to a node. An actor keeps its calls in order."""
        tasks = {call: task for call in calls if (task := self._find(call)) is not None}
        return {call: task for call, task in tasks.items() if not (task.attempt or task.actor)}
