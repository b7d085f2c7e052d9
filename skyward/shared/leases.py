"""Locks and semaphores: permits that a call holds until it releases them, or ends."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from .messages import OK
from .thing import AwaitedThing, LeaseOwner, RequestRefused, StoreShelf, Ticket


class PermitsState(AwaitedThing):
    """Permits that calls hold, granted in the order of the requests. Option: their number; a lock has one."""

    def __init__(self, key: tuple[str, str], options: tuple[Any, ...], shelf: StoreShelf) -> None:
        super().__init__(key, options, shelf)
        (self._permits,) = options
        self._held: dict[int, LeaseOwner] = {}
        """Holders by fencing number, oldest first."""

    @property
    def is_idle(self) -> bool:
        return not self._held and not self.line

    def _acquire(self, ticket: Ticket) -> Any:
        if len(self._held) >= self._permits:
            return self.park(ticket, self.line)
        return self._grant(ticket)

    def _grant(self, ticket: Ticket) -> int:
        fence = next(self.shelf.numbers)
        self._held[fence] = ticket.owner
        ticket.owner.things[self] = None
        ticket.undo = partial(PermitsState._free, fence=fence)
        return fence

    def _release(self, ticket: Ticket) -> None:
        fence = next((fence for fence, owner in reversed(self._held.items()) if owner is ticket.owner), None)
        if fence is None:
            raise RequestRefused(
                "UsageError", f"{self.title}: this call does not hold it; release only what the same call acquired"
            )
        self._free(fence)

    def _free(self, fence: int) -> None:
        owner = self._held.pop(fence, None)
        if owner is not None and owner not in self._held.values():
            owner.things.pop(self, None)
        while self.line and len(self._held) < self._permits:
            ticket = next(iter(self.line))
            del self.line[ticket]
            self.shelf.reply(ticket, OK, self._grant(ticket))

    def _state(self, _: Ticket) -> tuple[int, int]:
        """Return how many permits are held, and how many tickets wait."""
        return len(self._held), len(self.line)

    def _holds(self, _: Ticket, fence: int) -> bool:
        return fence in self._held

    def left(self, owner: LeaseOwner, *, is_well: bool) -> None:
        for fence in [fence for fence, holder in self._held.items() if holder is owner]:
            self._free(fence)

    verbs: ClassVar = {"acquire": _acquire, "release": _release, "state": _state, "holds": _holds}
