"""Deadlock detection for calls that tasks make of each other.

A task that waits for a call of its own keeps its slot. A waiting call can start, sooner or later, only if one of its
places is free, or is held by a task that will end. A task will end if it waits for no call, or only for calls that can
start. The remaining calls wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class NestedEntry(Protocol):
    """Task or gang."""

    @property
    def id(self) -> int: ...
    @property
    def parent(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places by node. `slots`: node -> slots. `held`: parent -> node -> places. `needs`: see `Scheduler._needs`."""

    slots: dict[int, int]
    held: dict[int, dict[int, int]]
    needs: Callable[[NestedEntry], tuple[tuple[int, ...], int, bool] | None]


class Family:
    """Open calls by the task that made them."""

    def __init__(self) -> None:
        self._calls: dict[int, NestedEntry] = {}
        self._by_parent: dict[int, set[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def parents(self) -> list[int]:
        return list(self._by_parent)

    def add(self, parent: int | None, entry: NestedEntry) -> None:
        assert parent is not None
        self._calls[entry.id] = entry
        self._by_parent.setdefault(parent, set()).add(entry.id)

    def remove(self, call: int) -> None:
        """Forget a call that has ended; unknown calls are ignored."""
        entry = self._calls.pop(call, None)
        if entry is None or entry.parent is None:
            return
        of_parent = self._by_parent[entry.parent]
        of_parent.discard(call)
        if not of_parent:
            del self._by_parent[entry.parent]

    def is_stuck(self, entry: NestedEntry, places: Places) -> bool:
        """Return whether a waiting call can never start.

        Simulates the best case: parents whose calls can all start are assumed to end and free their places. This
        repeats until the call fits, or no further parent can end.
        """
        held = dict.fromkeys(places.slots, 0)
        for of_parent in places.held.values():
            for node, count in of_parent.items():
                held[node] += count
        waiting = set(self._by_parent)
        while not self._may_start(entry, held, places):
            going_on = [
                parent
                for parent in waiting
                if all(self._goes_on(self._calls[call], waiting, held, places) for call in self._by_parent[parent])
            ]
            if not going_on:
                return True
            for parent in going_on:
                waiting.discard(parent)
                for node, count in places.held.get(parent, {}).items():
                    held[node] -= count
        return False

    def _goes_on(self, entry: NestedEntry, waiting: set[int], held: dict[int, int], places: Places) -> bool:
        if places.needs(entry) is None:
            return entry.id not in waiting
        return self._may_start(entry, held, places)

    def _may_start(self, entry: NestedEntry, held: dict[int, int], places: Places) -> bool:
        need = places.needs(entry)
        if need is None:
            return True
        nodes, count, is_on_all = need
        fits = [held[n] + min(count, places.slots[n]) <= places.slots[n] for n in nodes]
        return all(fits) if is_on_all else any(fits)
