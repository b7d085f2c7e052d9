"""Refused sign-ins in the audit, so few that whoever guesses codes cannot fill it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..model.access import Actor, Role
from ..store.schema import ORGANIZATION, PROJECT
from . import audit

if TYPE_CHECKING:
    from ..store.database import Database
    from ..store.transaction import Transaction

PERIOD_S = 60.0
"""Seconds between two entries of one server. An entry counts all that were refused since the one before."""


class RefusedSignIns:
    """Counter of refused sign-ins. Use it from one event loop only.

    Args:
        database: Where the audit is.
        period_s: Seconds between two entries.
    """

    def __init__(self, database: Database, *, period_s: float = PERIOD_S) -> None:
        self._database = database
        self._period_s = period_s
        self._count = 0
        self._due = time.monotonic()

    async def add(self) -> None:
        """Count one. The first one after a quiet time is in the audit at once."""
        self._count += 1
        if time.monotonic() >= self._due:
            await self.record()

    async def record_due(self) -> None:
        """Write what was counted, if its time has come. Call it each few seconds."""
        if self._count and time.monotonic() >= self._due:
            await self.record()

    async def record(self) -> None:
        """Write what was counted."""
        count, self._count = self._count, 0
        if count:
            self._due = time.monotonic() + self._period_s
            await self._database.write(_record, count)


def _record(tx: Transaction, count: int) -> None:
    hub = Actor(user="hub", organization=ORGANIZATION, project=PROJECT, role=Role.OWNER)
    audit.record(tx, hub, "session.refuse", "code", {"count": count})
