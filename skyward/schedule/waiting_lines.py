"""Waiting tasks and gangs: one line for each set of allowed nodes, and one order across all lines.

An entry that cannot be placed blocks only its own line. So placing looks at each line, not at each entry: ten thousand
calls that wait for one node do not slow down the others. Every operation takes constant time per entry, so a hundred
thousand calls can be cancelled at once. A plain dict would not do: finding its first key walks over all removed ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


@dataclass(slots=True, eq=False)
class TaskEntry:
    """Open task."""

    id: int
    nodes: tuple[int, ...] | None  # allowed nodes; None for any that is not kept
    in_advance: bool = True  # may be sent before a slot is free
    node: int | None = None
    is_recalled: bool = False
    parent: int | None = None
    """Task or gang that called it."""
    turn: tuple[int, int] = (0, 0)

    @property
    def line(self) -> Hashable:
        return self.nodes if self.parent is None else ("nested", self.nodes)


@dataclass(slots=True, eq=False)
class GangEntry:
    """Waiting gang."""

    id: int
    nodes: tuple[int, ...] | None  # needs all of them; None for any one of `one_of`
    one_of: tuple[int, ...] | None  # None for any node that is not kept
    places: int  # per node
    parent: int | None = None
    turn: tuple[int, int] = (0, 0)

    @property
    def line(self) -> Hashable:
        return self.parent is not None, self.nodes, self.one_of


class _WaitingEntry(Protocol):
    turn: tuple[int, int]

    @property
    def id(self) -> int: ...

    @property
    def line(self) -> Hashable: ...


E = TypeVar("E", bound=_WaitingEntry)


class WaitingLines(Generic[E]):
    """Entries in order. Entries of one line may go to the same nodes, so whatever blocks the first blocks all."""

    def __init__(self) -> None:
        self.by_key: dict[Hashable, OrderedDict[int, E]] = {}
        """Line -> its entries by number. No line is empty, so this is empty if nothing waits."""
        self._first = 0
        self._last = 0

    def append(self, entry: E, *, is_urgent: bool = False) -> None:
        """Add an entry at the end; an urgent one behind earlier urgent ones. Urgent entries have their own lines."""
        self._last += 1
        entry.turn = (not is_urgent, self._last)
        self.by_key.setdefault(entry.line, OrderedDict())[entry.id] = entry

    def append_left(self, entry: E) -> None:
        """Add an entry before all others."""
        self._first -= 1
        entry.turn = (0, self._first)
        line = self.by_key.setdefault(entry.line, OrderedDict())
        line[entry.id] = entry
        line.move_to_end(entry.id, last=False)

    def remove(self, entry: E) -> None:
        line = self.by_key[entry.line]
        del line[entry.id]
        if not line:
            del self.by_key[entry.line]

    def find(self, number: int) -> E | None:
        """Return the waiting entry with that number, or None."""
        return next((line[number] for line in self.by_key.values() if number in line), None)

    def oldest(self, closed: set[Hashable]) -> E | None:
        """Return the first entry whose line is not in `closed`, or None."""
        best: E | None = None
        for key, line in self.by_key.items():
            if key not in closed:
                first = next(iter(line.values()))
                if best is None or first.turn < best.turn:
                    best = first
        return best

    def __len__(self) -> int:
        return sum(map(len, self.by_key.values()))

    def __iter__(self) -> Iterator[E]:
        """Iterate over a copy of all entries, in no particular order."""
        return iter([entry for line in self.by_key.values() for entry in line.values()])
