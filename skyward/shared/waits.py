"""Queues, events and barriers: things that a task can wait for."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, ClassVar, NoReturn

from .messages import OK, REFUSED
from .thing import ENTRY_BYTES, AwaitedThing, LeaseOwner, RequestRefused, StoreShelf, Ticket


class QueueState(AwaitedThing):
    """Values, first in and first out. Option: the most values, 0 for any number.

    `line` has the tickets that wait for a value.
    """

    def __init__(self, key: tuple[str, str], options: tuple[Any, ...], shelf: StoreShelf) -> None:
        super().__init__(key, options, shelf)
        (self._limit,) = options
        self._values: deque[bytes] = deque()
        self._putters: dict[Ticket, bytes] = {}
        """Tickets that wait for room, with their values."""

    @property
    def is_idle(self) -> bool:
        return not self._values and not self._putters and not self.line

    def _put(self, ticket: Ticket, value: bytes) -> Any:
        has_room = not self._limit or len(self._values) < self._limit
        if not has_room and not ticket.may_park:
            return self.park(ticket, self._putters)
        self.shelf.memory.take(len(value) + ENTRY_BYTES)
        if not has_room:
            return self.park(ticket, self._putters, value)
        self._add(ticket, value)
        return None

    def _add(self, ticket: Ticket, value: bytes) -> None:
        if self.line:
            getter = next(iter(self.line))
            del self.line[getter]
            self._give(getter, value)
            self.shelf.reply(getter, OK, value)
            return
        self._values.append(value)
        ticket.undo = partial(QueueState._take_back, value=value)

    def _get(self, ticket: Ticket) -> Any:
        if not self._values:
            return self.park(ticket, self.line)
        value = self._values.popleft()
        self._give(ticket, value)
        self._fill()
        return value

    def _give(self, ticket: Ticket, value: bytes) -> None:
        self.shelf.memory.take(-(len(value) + ENTRY_BYTES))
        ticket.undo = partial(QueueState._put_back, value=value)

    def _fill(self) -> None:
        """Let tickets that wait for room put their values."""
        while self._putters and len(self._values) < self._limit:
            putter = next(iter(self._putters))
            self._add(putter, self._putters.pop(putter))
            self.shelf.reply(putter, OK, None)

    def _put_back(self, value: bytes) -> None:
        """Put a value back that nobody has read, in front of the others."""
        self.shelf.memory.used_bytes += len(value) + ENTRY_BYTES  # it was there before, so it is never refused
        if self.line:
            getter = next(iter(self.line))
            del self.line[getter]
            self._give(getter, value)
            self.shelf.reply(getter, OK, value)
        else:
            self._values.appendleft(value)

    def _take_back(self, value: bytes) -> None:
        """Remove a value whose sender gave up, unless somebody has it already."""
        for index in range(len(self._values) - 1, -1, -1):
            if self._values[index] is value:
                del self._values[index]
                self.shelf.memory.take(-(len(value) + ENTRY_BYTES))
                self._fill()
                return

    def _count(self, _: Ticket) -> int:
        return len(self._values)

    def _clear(self, _: Ticket) -> int:
        """Remove the values that are there now; return how many."""
        count = len(self._values)
        self.shelf.memory.take(-sum(len(value) + ENTRY_BYTES for value in self._values))
        self._values.clear()
        self._fill()
        return count

    def withdraw(self, ticket: Ticket) -> None:
        super().withdraw(ticket)
        value = self._putters.pop(ticket, None)
        if value is not None:
            self.shelf.memory.take(-(len(value) + ENTRY_BYTES))

    verbs: ClassVar = {"put": _put, "get": _get, "count": _count, "clear": _clear}


class EventState(AwaitedThing):
    """A flag that tickets can wait for."""

    _is_set = False

    @property
    def is_idle(self) -> bool:
        return not self._is_set and not self.line

    def _set(self, _: Ticket) -> None:
        self._is_set = True
        line, self.line = self.line, {}
        for ticket in line:
            self.shelf.reply(ticket, OK, None)

    def _clear(self, _: Ticket) -> None:
        self._is_set = False

    def _get(self, _: Ticket) -> bool:
        return self._is_set

    def _wait(self, ticket: Ticket) -> Any:
        return None if self._is_set else self.park(ticket, self.line)

    verbs: ClassVar = {"set": _set, "clear": _clear, "get": _get, "wait": _wait}


class BarrierState(AwaitedThing):
    """A meeting of several tickets, as `threading.Barrier`. Option: their number.

    A call that has waited here is a party until it ends. When one of them fails or dies, the barrier breaks, because
    the others might wait for it without end. It stays broken until it is reset.
    """

    def __init__(self, key: tuple[str, str], options: tuple[Any, ...], shelf: StoreShelf) -> None:
        super().__init__(key, options, shelf)
        (self._parties,) = options
        self._members: dict[LeaseOwner, None] = {}
        self._why_broken = ""

    @property
    def is_idle(self) -> bool:
        return not self.line and not self._members and not self._why_broken

    def _wait(self, ticket: Ticket) -> Any:
        if self._why_broken:
            self._refuse()
        if len(self.line) + 1 < self._parties:
            parked = self.park(ticket, self.line)
            if not ticket.may_park:
                self._break("a party did not wait for the others")
                return parked
            self._join(ticket.owner)
            return parked
        self._join(ticket.owner)
        line, self.line = self.line, {}
        for index, other in enumerate(line):
            self.shelf.reply(other, OK, index)
        return len(line)

    def _join(self, owner: LeaseOwner) -> None:
        self._members[owner] = None
        owner.things[self] = None

    def _abort(self, _: Ticket) -> None:
        self._break("a party aborted it")

    def _reset(self, _: Ticket) -> None:
        """Make the barrier new. Tickets that wait get an error, as with `threading.Barrier`."""
        if self.line:
            self._break("it was reset")
        self._why_broken = ""

    def _state(self, _: Ticket) -> tuple[int, bool]:
        return len(self.line), bool(self._why_broken)

    def _break(self, why: str) -> None:
        self._why_broken = self._why_broken or why
        line, self.line = self.line, {}
        for ticket in line:
            self.shelf.reply(ticket, REFUSED, ("BrokenBarrierError", self._broken_text()))

    def _broken_text(self) -> str:
        return f"{self.title}: is broken, because {self._why_broken}; reset() makes it new, and so does another name"

    def _refuse(self) -> NoReturn:
        raise RequestRefused("BrokenBarrierError", self._broken_text())

    def withdraw(self, ticket: Ticket) -> None:
        if ticket in self.line:
            del self.line[ticket]
            self._break("a party stopped waiting")

    def left(self, owner: LeaseOwner, *, is_well: bool) -> None:
        self._members.pop(owner, None)
        if not is_well and (self._members or self.line):
            self._break("the call of a party failed or died")

    verbs: ClassVar = {"wait": _wait, "abort": _abort, "reset": _reset, "state": _state}
