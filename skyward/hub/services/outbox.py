"""Outbox: events that are committed with the change that they announce, and are delivered afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from ..model.access import Actor
from ..store import journal
from ..store.journal import EventRow

if TYPE_CHECKING:
    from ..store.transaction import Transaction

NOTHING: Mapping[str, object] = {}


class EventSink(Protocol):
    """Seam for a receiver of events, such as a message queue.

    Nothing implements it yet. The live stream of the pages reads the same rows by itself.
    """

    async def deliver(self, events: list[EventRow]) -> None:
        """Take events in their order. The outbox keeps them until this returns."""


def record(tx: Transaction, actor: Actor, kind: str, resource: str, body: Mapping[str, object] = NOTHING) -> None:
    """Record an event in the transaction of its change.

    Args:
        tx: Transaction of the change.
        actor: Who made it.
        kind: Noun and past participle, such as `run.created`.
        resource: Id or name of the thing.
        body: Values that JSON can hold.
    """
    journal.add_event(tx, actor.organization, actor.project, kind, resource, body)
