"""Calls that tasks make of each other: which of them could never start.

A task that has called something holds its slot until that has ended. So a call starts, sooner or later, only if one of
its places is free, or held by something that ends: by what has called nothing, or by what has called only what starts.
What is left are calls that wait in a circle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Family", "NestedEntry", "Places"]


class NestedEntry(Protocol):
    """A task or gang."""

    @property
    def id(self) -> int: ...
    @property
    def parent(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class Places:
    """slots: of each node. held: by parent and node, how many of them it holds. needs: see `Scheduler._needs`."""

    slots: dict[int, int]
    held: dict[int, dict[int, int]]
    needs: Callable[[NestedEntry], tuple[tuple[int, ...], int, bool] | None]


class Family:
    """Who has called whom, as long as the call is open."""

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
        """It has ended, or there never was one of that number."""
        entry = self._calls.pop(call, None)
        if entry is None or entry.parent is None:
            return
        of_parent = self._by_parent[entry.parent]
        of_parent.discard(call)
        if not of_parent:
            del self._by_parent[entry.parent]

    def is_stuck(self, entry: NestedEntry, places: Places) -> bool:
        """Whether a call that waits can never start."""
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
