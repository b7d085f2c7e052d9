"""What waits for a place: one line for each set of nodes that an entry may go to, and one order over all of them.

An entry that cannot be placed holds up those behind it in its own line only, so placing costs a look at each line and
not at each entry: ten thousand calls that wait for one node cost the others nothing. Every step on an entry takes the
same time, however many wait: a hundred thousand calls may be cancelled at once. A plain dict would not do: it finds
its first key by walking over all that were removed in front of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

__all__ = ["GangEntry", "TaskEntry", "WaitingLines"]


@dataclass(slots=True, eq=False)
class TaskEntry:
    """A task, as long as it is open."""

    id: int
    nodes: tuple[int, ...] | None  # it may go to; None: any that is not kept
    retries: int
    in_advance: bool = True  # may be sent before a slot is free
    node: int | None = None
    is_recalled: bool = False
    parent: int | None = None
    """The task or gang that has called it."""
    turn: tuple[int, int] = (0, 0)

    @property
    def line(self) -> Hashable:
        return self.nodes if self.parent is None else ("nested", self.nodes)


@dataclass(slots=True, eq=False)
class GangEntry:
    """A gang, as long as it waits."""

    id: int
    nodes: tuple[int, ...] | None  # all of them; None: any one of `one_of`
    one_of: tuple[int, ...] | None  # None: of those that are not kept
    places: int  # on each node
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
    """Entries in order. Those of one `line` may go to the same nodes, so what keeps the first back keeps all."""

    def __init__(self) -> None:
        self.by_key: dict[Hashable, OrderedDict[int, E]] = {}
        """The entries of each line, by their number. No line is empty, so this says whether anything waits."""
        self._first = 0
        self._last = 0

    def append(self, entry: E, *, is_urgent: bool = False) -> None:
        """`is_urgent`: behind others that are, and in front of all that are not. Those have lines of their own."""
        self._last += 1
        entry.turn = (not is_urgent, self._last)
        self.by_key.setdefault(entry.line, OrderedDict())[entry.id] = entry

    def append_left(self, entry: E) -> None:
        """In front of all others."""
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
        """The entry of that number, if it waits."""
        return next((line[number] for line in self.by_key.values() if number in line), None)

    def oldest(self, closed: set[Hashable]) -> E | None:
        """The first of all whose line is not in `closed`."""
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
        """All, in no order; the iteration is over a copy."""
        return iter([entry for line in self.by_key.values() for entry in line.values()])
