"""Guesses of sign-in codes: all are counted, and the audit stays short."""

from __future__ import annotations

import asyncio
import json

from skyward.hub.model.refusal import Reason
from skyward.hub.services.hub import Hub
from skyward.hub.services.refused_sign_ins import RefusedSignIns
from skyward.hub.store import journal
from skyward.hub.store.database import Database
from tests.hub.services.test_tracking import refused
from tests.waiting import until


def counts(database: Database) -> list[int]:
    """Return the counts in the audit, the newest first."""
    rows = database.read_and_wait(journal.audit_page, 1, 1, 2**62, 1000)
    return [json.loads(row.detail)["count"] for row in rows if row.action == "session.refuse"]


def test_guesses_are_counted_in_one_entry_a_minute(database: Database) -> None:
    hub = Hub(database, None)
    for number in range(40):
        code = f"sky_{number:012x}_{'0' * 43}"
        refused(hub.access.sign_in(code), Reason.UNAUTHENTICATED, "wrong, used or too old")
    asyncio.run(hub.access.refused_sign_ins.record_due())
    assert counts(database) == [1]
    asyncio.run(hub.access.refused_sign_ins.record())  # as a server does that ends
    assert counts(database) == [39, 1]


def test_a_later_look_writes_what_was_counted(database: Database) -> None:
    attempts = RefusedSignIns(database, period_s=0.1)

    async def guess() -> None:
        await attempts.add()
        await attempts.add()

    def look() -> bool:
        asyncio.run(attempts.record_due())
        return sum(counts(database)) == 2

    asyncio.run(guess())
    until(look)
    asyncio.run(attempts.record_due())
    assert sum(counts(database)) == 2
