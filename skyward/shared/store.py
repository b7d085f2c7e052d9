"""The store: takes requests one after another, and answers each once. That order is the only one there is.

Sessions carry requests. A session has one request at a time, with growing numbers. Its owner, a call of a task or the
program, holds the leases. When a session ends, its request is withdrawn; when an owner ends, its leases are free.

- A request that is sent again is not carried out again: its session remembers the last number, and the answer.
- A request that waits is parked in its thing, and another request, or the end of an owner, answers it.
- There is no clock. Who no longer wants to wait withdraws the request. The answer then says whether it came too late.
- A caller that cannot wait even for that answer forgets the request: whatever it did is undone. A value that was taken
  from a queue goes back, and a lock becomes free.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

from ..core.records import dataclass
from .containers import CounterState, DictState, ListState, SetState
from .leases import PermitsState
from .messages import OK, REFUSED, WITHDRAWN, StoreAnswer
from .thing import PARKED, WITHDRAWN_NOW, LeaseOwner, Memory, RequestRefused, StoreShelf, Thing, Ticket
from .waits import BarrierState, EventState, QueueState

LIMIT_BYTES: Final = 1 << 30
"""Most bytes of all values of a pool."""

ThingKey = tuple[str, str]
"""Kind and name of a thing."""

HandedOver = tuple[dict[ThingKey, Thing], dict[int, LeaseOwner], int, int]
"""Things, owners of their leases, bytes of all values, and the next version, from one store to another."""

_KINDS: Mapping[str, type[Thing]] = {
    "dict": DictState,
    "list": ListState,
    "set": SetState,
    "counter": CounterState,
    "queue": QueueState,
    "barrier": BarrierState,
    "lock": PermitsState,
    "semaphore": PermitsState,
    "event": EventState,
}


@dataclass(eq=False, slots=True)
class _StoreSession:
    owner: LeaseOwner
    ticket: Ticket | None = None
    """The last request."""
    answer: StoreAnswer | None = None
    """The answer to it; None while it waits."""


class Store:
    """Shared state of one pool. Not thread-safe.

    A thing that a request named is forgotten as soon as it equals a new one. An object of it may be used up to then,
    and the next request makes another.

    Args:
        limit_bytes: Most bytes of all values.
        lost: Kinds and names of things that an earlier store has lost.
        noted: Called when a thing comes about (True) or is forgotten (False), with its kind and name. It may refuse
            the former by raising RequestRefused.

    Attributes:
        answers: Answers that nobody has taken yet, in the order in which they came about.
    """

    def __init__(
        self,
        limit_bytes: int = LIMIT_BYTES,
        *,
        lost: AbstractSet[ThingKey] = frozenset(),
        noted: Callable[[ThingKey, bool], object] = lambda key, is_there: None,
    ) -> None:
        self._lost = lost
        self._noted = noted
        self.answers: list[StoreAnswer] = []
        self._sessions: dict[int, _StoreSession] = {}
        self._owners: dict[int, LeaseOwner] = {}
        self._things: dict[tuple[str, str], Thing] = {}
        self._shelf = StoreShelf(Memory(limit_bytes), self._reply)

    @property
    def used_bytes(self) -> int:
        """Bytes of all values."""
        return self._shelf.memory.used_bytes

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is stored, held or awaited."""
        return not self._things

    # Another store ----------------------------------------------------------------------------------------------------

    def hand_over(self) -> HandedOver:
        """Return everything for another store, by pickle. Requests that wait are not answered: ask them again there."""
        for at in self._sessions.values():
            if at.ticket is not None and at.answer is None:
                self._unpark(at.ticket)
        owners = {number: owner for number, owner in self._owners.items() if owner.things}
        return self._things, owners, self.used_bytes, next(self._shelf.numbers)

    def take_over(self, things: HandedOver) -> None:
        """Go on for another store. This one is new. Leases of owners that have no session here end."""
        self._things, owners, self._shelf.memory.used_bytes, number = things
        self._shelf.numbers = itertools.count(number)
        for thing in self._things.values():
            thing.shelf = self._shelf
        for number, owner in owners.items():
            if number in self._sessions:
                owner.sessions = 1
                self._owners[number] = self._sessions[number].owner = owner
            else:
                self._leave(owner, is_well=False)

    # Sessions and owners ----------------------------------------------------------------------------------------------

    def open(self, session: int, owner: int) -> None:
        """Open a session. An owner begins with its first session, which may be any of its sessions."""
        known = self._owners.get(owner)
        if known is None:
            known = self._owners[owner] = LeaseOwner(owner)
        known.sessions += 1
        self._sessions[session] = _StoreSession(known)

    def close(self, session: int) -> None:
        """End a session. The owner ends with the session of its own number, or with its last one."""
        at = self._sessions.pop(session, None)
        if at is None:
            return
        if at.ticket is not None and at.answer is None:
            self._unpark(at.ticket)
        owner = at.owner
        owner.sessions -= 1
        if session == owner.number or not owner.sessions:
            self._owners.pop(owner.number, None)
            for other in [other for other in self._sessions.values() if other.owner is owner]:
                if other.ticket is not None and other.answer is None:
                    self._withdraw(other)
            self._leave(owner, is_well=False)

    def leave(self, session: int, number: int, *, is_well: bool) -> None:
        """Free all leases of an owner, and answer. `is_well`: its call returned; otherwise barriers break."""
        at = self._sessions.get(session)
        if at is not None:
            self._leave(at.owner, is_well=is_well)
            self.answers.append(StoreAnswer(session, number, OK, None))

    def _leave(self, owner: LeaseOwner, *, is_well: bool) -> None:
        things = list(owner.things)
        owner.things.clear()
        for thing in things:
            thing.left(owner, is_well=is_well)
            self._tidy(thing)

    # Requests ---------------------------------------------------------------------------------------------------------

    def request(self, session: int, number: int, fields: tuple[Any, ...]) -> None:
        """Carry out a request; see `Request.fields`. One that came before gets the same answer again, if it has one."""
        at = self._sessions.get(session)
        if at is None:
            return
        if at.ticket is not None and number <= at.ticket.number:
            if number == at.ticket.number and at.answer is not None:
                self.answers.append(at.answer)
            return
        kind, name, verb, arguments, options, may_park = fields
        ticket = at.ticket = Ticket(session, number, at.owner, may_park)
        at.answer = None
        try:
            thing = ticket.thing = self._thing(kind, name, options)
            value = thing.apply(ticket, verb, arguments)
        except RequestRefused as refused:
            self._reply(ticket, REFUSED, (refused.kind, str(refused)))
        except Exception as error:  # our mistake in one request must not stop the others
            text = f"{kind}={name!r}: {verb} failed: {type(error).__name__}: {error}; report this bug"
            self._reply(ticket, REFUSED, ("InternalError", text))
        else:
            if value is WITHDRAWN_NOW:
                self._reply(ticket, WITHDRAWN, None)
            elif value is not PARKED:
                self._reply(ticket, OK, value)
        self._tidy(ticket.thing)

    def withdraw(self, session: int, number: int) -> None:
        """Answer a request that still waits. One that has its answer keeps it."""
        at = self._sessions.get(session)
        if at is not None and at.ticket is not None and at.ticket.number == number and at.answer is None:
            self._withdraw(at)

    def forget(self, session: int, number: int) -> None:
        """Undo a request whose answer nobody has read, and give no answer."""
        at = self._sessions.get(session)
        if at is None or at.ticket is None or at.ticket.number != number:
            return
        ticket, answer = at.ticket, at.answer
        if answer is None:
            self._unpark(ticket)
            at.answer = StoreAnswer(session, number, WITHDRAWN, None)
        elif ticket.undo is not None:
            assert ticket.thing is not None
            undo, ticket.undo = ticket.undo, None
            thing = self._things.get(ticket.thing.key)
            if thing is None:
                thing = self._things[ticket.thing.key] = ticket.thing
                with contextlib.suppress(RequestRefused):  # nobody reads an answer
                    self._noted(thing.key, True)
            undo(thing)
            self._tidy(thing)

    def _thing(self, kind: str, name: str, options: tuple[Any, ...]) -> Thing:
        thing = self._things.get((kind, name))
        if thing is None:
            if (kind, name) in self._lost:
                text = f"{kind}={name!r}: was lost with the head of the pool; use another name"
                raise RequestRefused("StateLost", text)
            self._noted((kind, name), True)
            thing = self._things[kind, name] = _KINDS[kind]((kind, name), options, self._shelf)
        elif thing.options != options:
            raise RequestRefused(
                "UsageError",
                f"{thing.title}: is in use with {thing.options[0]}, not {options[0]}; pass the same number everywhere",
            )
        return thing

    def _withdraw(self, at: _StoreSession) -> None:
        ticket = at.ticket
        assert ticket is not None
        self._unpark(ticket)
        self._reply(ticket, WITHDRAWN, None)

    def _unpark(self, ticket: Ticket) -> None:
        if ticket.thing is not None:
            ticket.thing.withdraw(ticket)
            self._tidy(ticket.thing)

    def _reply(self, ticket: Ticket, status: int, value: Any) -> None:
        at = self._sessions.get(ticket.session)
        answer = StoreAnswer(ticket.session, ticket.number, status, value)
        if at is not None and at.ticket is ticket:
            at.answer = answer
        self.answers.append(answer)

    def _tidy(self, thing: Thing | None) -> None:
        """Forget a thing that equals a new one."""
        if thing is not None and thing.is_idle and self._things.pop(thing.key, None) is not None:
            self._noted(thing.key, False)
