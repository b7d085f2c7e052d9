"""Waiting tasks and gangs: one line for each set of allowed nodes and each need, and one order across all lines.

An entry that cannot be placed blocks only its own line. A blocked line is tried again when something changes where it
waits: at the group of its nodes, or for a gang that needs certain nodes, at one that it lacks. So an event costs as
much as the lines that it may help, and not more with ten thousand others.

Every operation takes constant time per entry, so a hundred thousand calls can be cancelled at once. An entry that is
cancelled stays in its queue, and is skipped when its turn comes, or with many others like it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable, Iterable, Iterator

from .groups import Entry, GangEntry, Group, Line, NodeEntry, TaskEntry, Turn

FIRST_TURN: Turn = 2**60
"""Earlier than the turn of any entry that goes to the end."""


class WaitingLines:
    """All waiting entries, and the lines to try next."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Line] = {}
        self.count = 0
        """Entries that wait."""
        self.gangs: dict[int, GangEntry] = {}
        """Gangs and actors that wait, by their numbers."""
        self.overfilling = 0
        """Number of lines whose entries may go to nodes without a free slot."""
        self._with_needs: dict[Line, None] = {}
        """Lines of all entries but tasks without numbers."""
        self.ready: list[tuple[Turn, int, Line]] = []
        """Heap of the lines to try."""
        self._pushed = itertools.count()
        self._first = 0
        self._last = 0

    @property
    def lines(self) -> Iterable[Line]:
        """All lines, in no particular order."""
        return self._by_key.values()

    def line_of(self, key: Hashable) -> Line | None:
        """Return the line of that key; None if nothing waits there. Needs no lock."""
        return self._by_key.get(key)

    def append(self, entry: Entry, group: Group, *, is_urgent: bool = False) -> Line:
        """Add an entry at the end; an urgent one behind earlier urgent ones. Urgent entries have their own lines."""
        self._last += 1
        entry.turn = self._last if is_urgent else FIRST_TURN + self._last
        line = self._line(entry, group)
        line.entries.append(entry)
        return line

    def append_to(self, line: Line, task: TaskEntry) -> None:
        """Add a task at the end of its line, like `append`."""
        self._last += 1
        task.turn = FIRST_TURN + self._last
        task.line = line
        line.entries.append(task)
        line.count += 1
        self.count += 1

    def append_left(self, entry: Entry, group: Group) -> Line:
        """Add an entry before all others."""
        self._first -= 1
        entry.turn = self._first
        line = self._line(entry, group)
        line.entries.appendleft(entry)
        line.first = entry
        line.is_ready = False  # it is ready at another turn now
        self.make_ready(line)
        return line

    def _line(self, entry: Entry, group: Group) -> Line:
        key = _key(entry, group)
        line = self._by_key.get(key)
        if line is None:
            line = self._by_key[key] = Line(key, group, entry)
            if entry.need is not None:
                self._with_needs[line] = None
            self.overfilling += line.may_overfill
            self.make_ready(line)
        if isinstance(entry, GangEntry):
            self.gangs[entry.id] = entry
        entry.line = line
        line.count += 1
        self.count += 1
        return line

    def remove(self, entry: Entry) -> Line:
        """Remove an entry. The line is tried again if that was its first, and is gone with its last."""
        line = entry.line
        assert line is not None
        if line.first is entry:
            self.remove_first(line)
            if line.count:
                self.make_ready(line)
            return line
        self._leave(entry, line)
        if len(line.entries) > 2 * line.count:
            line.entries = deque(line)
        return line

    def remove_first(self, line: Line) -> None:
        """Remove the first entry of a line. The line is gone with its last."""
        self._leave(line.first, line)
        if not line.count:
            self.overfilling -= line.may_overfill
            self._with_needs.pop(line, None)
            self.wait_at(line, None)
            line.is_ready = False
            del self._by_key[line.key]
            return
        entries = line.entries
        entries.popleft()
        while entries[0].line is not line:
            entries.popleft()
        line.first = entries[0]

    def _leave(self, entry: Entry, line: Line) -> None:
        entry.line = None
        line.count -= 1
        self.count -= 1
        if isinstance(entry, GangEntry):
            del self.gangs[entry.id]

    @property
    def only_blocked_line(self) -> Line | None:
        """Return the line, if there is one only, it is known to be blocked, and several entries wait in it."""
        if len(self._by_key) != 1 or self.count < 2:
            return None
        (line,) = self._by_key.values()
        return line if not line.is_ready and line.place is line.group and line.blocked is line.first else None

    # Which to try ---------------------------------------------------------------------------------------------------

    def make_ready(self, line: Line) -> None:
        """Have a line tried in its turn."""
        if not line.is_ready:
            line.is_ready = True
            heapq.heappush(self.ready, (line.first.turn, next(self._pushed), line))

    def wait_at(self, line: Line, place: Group | NodeEntry | None) -> None:
        """Let a line wait until `wake` is called for that place."""
        if line.place is place:
            return
        if line.place is not None:
            del line.place.lines[line]
        line.place = place
        if place is not None:
            place.lines[line] = None

    def wake(self, place: Group | NodeEntry) -> None:
        """Have the lines tried that wait at a group or at a node."""
        for line in place.lines:
            self.make_ready(line)

    def wake_needs(self) -> None:
        """Have the lines tried whose entries need other things than a slot and its share."""
        for line in self._with_needs:
            self.make_ready(line)

    def wake_all(self) -> None:
        for line in self._by_key.values():
            self.make_ready(line)

    def oldest_ready(self) -> Line | None:
        """Return the ready line whose first entry is oldest."""
        while self.ready:
            turn, _, line = self.ready[0]
            if line.is_ready and line.first.turn <= turn:
                return line
            heapq.heappop(self.ready)
            if line.is_ready:  # its first entry is gone since
                heapq.heappush(self.ready, (line.first.turn, next(self._pushed), line))
        return None

    def take_ready(self) -> Line | None:
        """Return the same line, and let it be ready no longer."""
        line = self.oldest_ready()
        if line is not None:
            heapq.heappop(self.ready)
            line.is_ready = False
        return line

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over a copy of all entries, in no particular order."""
        return iter([entry for line in self._by_key.values() for entry in line])


def _key(entry: Entry, group: Group) -> Hashable:
    """Return the key of an entry's line. The group stands for the allowed nodes and the need, which take time to hash.

    It lasts as long as its line, which holds it. Gangs for certain nodes share a group whatever they need.
    """
    if isinstance(entry, TaskEntry):
        return group if entry.parent is None else (group,)
    return group, entry.parent is None, entry.nodes is None, entry.count, entry.need
