"""Base of everything in the store that has a name, and the operations that may wait."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, ClassVar, Final

from ..core.records import dataclass

ENTRY_BYTES: Final = 128
"""Bytes that an entry counts beside its key and value, for Python's own objects."""


class RequestRefused(Exception):
    """Error of an operation, which has changed nothing. `kind` is the name of the class that the caller gets."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Parked:
    """Value of an operation that waits; its answer comes later."""


PARKED: Final = _Parked()
WITHDRAWN_NOW: Final = _Parked()
"""Value of an operation that would have to wait, and must not."""


class Memory:
    """Bytes of all values of a store, with a limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, size: int) -> None:
        """Count bytes, unless they exceed the limit."""
        if size > 0 and self.used_bytes + size > self.limit_bytes:
            raise RequestRefused(
                "UsageError",
                f"shared state: {size} more bytes exceed the limit of {self.limit_bytes} ({self.used_bytes} in use); "
                "remove entries, or keep large data in files or arguments",
            )
        self.used_bytes += size


@dataclass(eq=False, slots=True)
class LeaseOwner:
    """Call of a task, or the program, as the holder of leases."""

    number: int
    sessions: int = 0
    """Number of its open sessions."""
    things: dict[Thing, None] = field(default_factory=dict)
    """Things in which it holds a lease, or is a party."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One request of a session. `undo` takes its effect back if nobody has read the answer."""

    session: int
    number: int
    owner: LeaseOwner
    may_park: bool
    thing: Thing | None = None
    """Thing that the request is about."""
    undo: Callable[[Any], None] | None = None
    """Function of the thing of that name, which may be another object by then."""


Reply = Callable[[Ticket, int, Any], None]
"""Answers a ticket that waits: its status and value."""


@dataclass(eq=False, slots=True)
class StoreShelf:
    """Objects that all things of a store share."""

    memory: Memory
    reply: Reply
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    """Source of versions and fencing numbers. They grow for ever, also when a thing is forgotten and made again."""


class Thing:
    """Something with a name. It is forgotten when it is idle, so a name that nobody uses costs nothing.

    Args:
        key: Its kind and name.
        options: Fixed properties.
        shelf: Objects of the store.
    """

    verbs: ClassVar[Mapping[str, Callable[..., Any]]]

    def __init__(self, key: tuple[str, str], options: tuple[Any, ...], shelf: StoreShelf) -> None:
        self.key = key
        self.title = f"{key[0]}={key[1]!r}"
        self.options = options
        self.shelf = shelf

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the shelf, which is that of another store afterwards; see `Store.hand_over`."""
        return {name: value for name, value in vars(self).items() if name != "shelf"}

    @property
    def is_idle(self) -> bool:
        """Return whether the thing equals a new one."""
        raise NotImplementedError

    def apply(self, ticket: Ticket, verb: str, arguments: tuple[Any, ...]) -> Any:
        """Carry out an operation at once."""
        return self.verbs[verb](self, *arguments)

    def withdraw(self, ticket: Ticket) -> None:
        """Forget a ticket that waits here."""

    def left(self, owner: LeaseOwner, *, is_well: bool) -> None:
        """Free the leases of an owner that has ended; `is_well`: its call returned."""


class AwaitedThing(Thing):
    """Thing that tickets can wait for, in a line."""

    def __init__(self, key: tuple[str, str], options: tuple[Any, ...], shelf: StoreShelf) -> None:
        super().__init__(key, options, shelf)
        self.line: dict[Ticket, Any] = {}

    def apply(self, ticket: Ticket, verb: str, arguments: tuple[Any, ...]) -> Any:
        return self.verbs[verb](self, ticket, *arguments)

    def park(self, ticket: Ticket, line: dict[Ticket, Any], value: Any = None) -> Any:
        """Let a ticket wait, if it may."""
        if not ticket.may_park:
            return WITHDRAWN_NOW
        line[ticket] = value
        return PARKED

    def withdraw(self, ticket: Ticket) -> None:
        self.line.pop(ticket, None)
