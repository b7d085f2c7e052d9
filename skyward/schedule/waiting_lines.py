"""Waiting tasks and gangs: one line for each set of allowed nodes, and one order across all lines.

An entry that cannot be placed blocks only its own line. A blocked line is tried again when something changes where it
waits: at the group of its nodes, or for a gang that needs certain nodes, at one that it lacks. So an event costs as
much as the lines that it may help, and not more with ten thousand others. Every operation takes constant time per
entry, so a hundred thousand calls can be cancelled at once. A plain dict would not do: finding its first key walks over
all removed ones.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from .groups import Group, NodeEntry, Turn
from .resources import Need


@dataclass(slots=True, eq=False)
class TaskEntry:
    """Open task."""

    id: int
    nodes: tuple[int, ...] | None  # allowed nodes; None for any that is not kept
    in_advance: bool = True  # may be sent before a slot is free
    in_bulk: bool = True  # may be one of many that a node gets in advance
    node: int | None = None
    is_recalled: bool = False
    parent: int | None = None
    """Task or gang that called it."""
    turn: Turn = (0, 0)
    prefer: tuple[int, ...] = ()
    """Nodes to choose first."""
    need: Need | None = None
    """Resources beyond a slot and its share."""

    @property
    def line(self) -> Hashable:
        return self.nodes if self.parent is None and self.need is None else (self.parent is None, self.nodes, self.need)


@dataclass(slots=True, eq=False)
class GangEntry:
    """Waiting gang."""

    id: int
    nodes: tuple[int, ...] | None  # needs all of them; None for any `count` of `some_of`
    some_of: tuple[int, ...] | None  # None for any node that is not kept
    need: Need  # per node
    count: int = 1
    parent: int | None = None
    turn: Turn = (0, 0)

    @property
    def line(self) -> Hashable:
        return self.parent is not None, self.nodes, self.some_of, self.need, self.count


Entry = TaskEntry | GangEntry


@dataclass(slots=True, eq=False)
class Line:
    """Entries that may go to the same nodes, so whatever blocks the first blocks all. Never empty."""

    key: Hashable
    group: Group
    entries: OrderedDict[int, Entry] = field(default_factory=OrderedDict)
    is_ready: bool = False
    place: Group | int | None = None
    """Where it waits: at a group, or at the number of a node."""
    blocked: Entry | None = None
    """The first entry, once it was found to be blocked. Nodes may be reserved for it."""
    wanted: tuple[NodeEntry, ...] = ()
    """Nodes that are reserved for a blocked gang."""
    lacked: int = 0
    """Index of the node that a blocked gang was found to lack."""

    @property
    def first(self) -> Entry:
        return next(iter(self.entries.values()))


class WaitingLines:
    """All waiting entries, and the lines to try next."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Line] = {}
        self._of_entry: dict[int, Line] = {}
        self._at: dict[Group | int, dict[Line, None]] = {}
        self._watchers: dict[Line, None] = {}
        """Lines that wait at the number of a node."""
        self._ready: list[tuple[Turn, int, Line]] = []
        self._pushed = itertools.count()
        self._first = 0
        self._last = 0

    @property
    def lines(self) -> Iterable[Line]:
        """All lines, in no particular order."""
        return self._by_key.values()

    def append(self, entry: Entry, group: Group, *, is_urgent: bool = False) -> Line:
        """Add an entry at the end; an urgent one behind earlier urgent ones. Urgent entries have their own lines."""
        self._last += 1
        entry.turn = (not is_urgent, self._last)
        line = self._line(entry, group)
        line.entries[entry.id] = entry
        return line

    def append_left(self, entry: Entry, group: Group) -> None:
        """Add an entry before all others."""
        self._first -= 1
        entry.turn = (0, self._first)
        line = self._line(entry, group)
        line.entries[entry.id] = entry
        line.entries.move_to_end(entry.id, last=False)
        line.is_ready = False  # it is ready at another turn now
        self.make_ready(line)

    def _line(self, entry: Entry, group: Group) -> Line:
        line = self._by_key.get(entry.line)
        if line is None:
            line = self._by_key[entry.line] = Line(entry.line, group)
            line.entries[entry.id] = entry
            self.make_ready(line)
        self._of_entry[entry.id] = line
        return line

    def remove(self, entry: Entry) -> Line:
        """Remove an entry. The line is tried again if that was its first, and is gone with its last."""
        line = self._of_entry.pop(entry.id)
        was_first = line.first is entry
        del line.entries[entry.id]
        if not line.entries:
            self.wait_at(line, None)
            line.is_ready = False
            del self._by_key[line.key]
        elif was_first:
            self.make_ready(line)
        return line

    @property
    def only_blocked_line(self) -> Line | None:
        """Return the line, if there is one only, it is known to be blocked, and several entries wait in it."""
        if len(self._by_key) != 1 or len(self._of_entry) < 2:
            return None
        (line,) = self._by_key.values()
        return line if not line.is_ready and line.place is line.group and line.blocked is line.first else None

    def drop_first(self, line: Line) -> None:
        """Remove the first entry of a line of several. The next one is known to be blocked too."""
        number, _ = line.entries.popitem(last=False)
        del self._of_entry[number]
        line.blocked = line.first

    def line_of(self, number: int) -> Line | None:
        """Return the line of the waiting entry with that number, or None."""
        return self._of_entry.get(number)

    # Which to try ---------------------------------------------------------------------------------------------------

    def make_ready(self, line: Line) -> None:
        """Have a line tried in its turn."""
        if not line.is_ready:
            line.is_ready = True
            heapq.heappush(self._ready, (line.first.turn, next(self._pushed), line))

    def wait_at(self, line: Line, place: Group | int | None) -> None:
        """Let a line wait until `wake` is called for that place."""
        if line.place is place:
            return
        if line.place is not None:
            lines = self._at[line.place]
            del lines[line]
            if not lines:
                del self._at[line.place]
            self._watchers.pop(line, None)
        line.place = place
        if isinstance(place, int):
            self._watchers[line] = None
        if place is not None:
            self._at.setdefault(place, {})[line] = None

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def at(self, place: Group | int) -> Iterable[Line]:
        """Return the lines that wait at a group, or at the number of a node."""
        return self._at.get(place) or ()

    def wake(self, place: Group | int) -> None:
        """Have the lines tried that wait at a group, or at the number of a node."""
        for line in self.at(place):
            self.make_ready(line)

    def wake_watchers(self) -> None:
        """Have the lines tried that wait at the number of any node."""
        for line in self._watchers:
            self.make_ready(line)

    def wake_all(self) -> None:
        for line in self._by_key.values():
            self.make_ready(line)

    def next_ready(self) -> tuple[Line, Entry] | None:
        """Take the ready line whose first entry is oldest, and return both."""
        while self._ready:
            turn, _, line = heapq.heappop(self._ready)
            if not line.is_ready:
                continue
            first = line.first
            if first.turn > turn:  # its first entry is gone since
                heapq.heappush(self._ready, (first.turn, next(self._pushed), line))
                continue
            line.is_ready = False
            return line, first
        return None

    def __len__(self) -> int:
        return len(self._of_entry)

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over a copy of all entries, in no particular order."""
        return iter([line.entries[number] for number, line in self._of_entry.items()])
