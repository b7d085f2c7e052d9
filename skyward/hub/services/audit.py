"""Audit: who changed what, or read which artifact. Each entry is chained to the one before by its hash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..model.access import Actor, Right
from ..store import journal
from ..store.journal import AuditRow

if TYPE_CHECKING:
    from ..store.database import Database
    from ..store.transaction import ReadSnapshot, Transaction

NOTHING: Mapping[str, object] = {}
LAST = 2**62


def record(tx: Transaction, actor: Actor, action: str, resource: str, detail: Mapping[str, object] = NOTHING) -> None:
    """Record a change in its own transaction, so that there is neither a change without an entry nor the reverse.

    Args:
        tx: Transaction of the change.
        actor: Who made it.
        action: Verb with its noun, such as `run.create`.
        resource: Id or name of the thing.
        detail: Values that JSON can hold. Never a secret.
    """
    journal.add_audit(tx, actor.organization, actor.project, actor.user, actor.token, action, resource, detail)


@dataclass(frozen=True, slots=True)
class Break:
    """First entry whose hash does not fit."""

    id: int


class Audit:
    """Reader of the audit."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, actor: Actor, *, limit: int = 100, before: int | None = None) -> list[AuditRow]:
        """List entries of the actor's project, newest first."""
        actor.require(Right.MANAGE)
        return await self._database.read(
            journal.audit_page, actor.organization, actor.project, LAST if before is None else before, limit
        )

    async def verify(self, actor: Actor) -> Break | None:
        """Recompute the chain. None: nothing was changed or removed in its middle."""
        actor.require(Right.OWN)
        return await self._database.read(_first_break)


def _first_break(snapshot: ReadSnapshot) -> Break | None:
    number = journal.first_break(snapshot)
    return None if number is None else Break(number)
