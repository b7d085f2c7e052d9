"""Servers on one database: one leads, another one takes over, and one that lost the lead changes nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from skyward.hub.model.refusal import Refusal
from skyward.hub.services.hub import Hub
from skyward.hub.services.leader import HubLeader
from skyward.hub.store import journal, writer
from skyward.hub.store.database import Database
from skyward.hub.store.leases import NotHeld, take_lease
from skyward.hub.store.transaction import Transaction
from tests.hub.postgres import PostgresServer
from tests.waiting import until


def mark(tx: Transaction) -> None:
    """Write something that a test finds again."""
    journal.add_audit(tx, 1, 1, "hub", None, "test.mark", "x", {})


def age(tx: Transaction, seconds: int) -> None:
    """Let a lease be so much older."""
    tx.execute("UPDATE lease SET expires_at = expires_at - ?", (seconds * 1000,))


def marks(database: Database) -> int:
    sql = "SELECT count(*) FROM audit WHERE action = 'test.mark'"
    return int(database.read_and_wait(lambda snapshot: snapshot.execute(sql).fetchone()[0]))


def test_one_leads_until_its_lease_ends_and_then_another_one(database: Database) -> None:
    first, second = HubLeader(database, lasts_s=60), HubLeader(database, lasts_s=60)

    def leads(candidate: HubLeader) -> bool:
        return asyncio.run(candidate.leads())

    assert (leads(first), leads(second), leads(first)) == (True, False, True)
    asyncio.run(first.write(mark))
    with pytest.raises(NotHeld):
        asyncio.run(second.write(mark))
    database.write_and_wait(age, 61)  # the first one is heard of no more
    assert leads(second)
    with pytest.raises(NotHeld):  # it believes that it leads, and its number is too small
        asyncio.run(first.write(mark))
    assert first.is_leading
    assert not leads(first)
    asyncio.run(second.write(mark))
    assert marks(database) == 2
    asyncio.run(second.resign())
    assert (leads(first), leads(second)) == (True, False)


LEAD_AND_WAIT = """
import asyncio, sys
from skyward.hub.services.hub import Hub
from skyward.hub.store.database import Database

async def lead():
    hub = Hub(Database(sys.argv[1]), None)
    await hub.start()
    print(hub.leader.is_leading, flush=True)
    await asyncio.sleep(60)

asyncio.run(lead())
"""


def test_next_hub_on_sqlite_leads_at_once_when_the_one_before_was_killed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/hub.db"
    with subprocess.Popen([sys.executable, "-c", LEAD_AND_WAIT, url], stdout=subprocess.PIPE, text=True) as before:
        assert before.stdout is not None
        assert before.stdout.readline() == "True\n"
        before.kill()

    async def leads() -> bool:
        hub = Hub(Database(url), None)
        await hub.start()
        is_leading = hub.leader.is_leading
        await hub.leader.write(mark)
        await hub.close()
        return is_leading

    assert asyncio.run(leads())


def test_a_server_that_does_not_lead_stops(postgres: PostgresServer, postgres_template: str) -> None:
    url = postgres.new_database(postgres_template)

    async def run() -> None:
        first, second = Hub(Database(url), None), Hub(Database(url), None)
        await first.start()
        await second.start()
        assert (first.leader.is_leading, second.leader.is_leading) == (True, False)
        await second.close()
        await first.close()

    asyncio.run(run())
    postgres.drop_database(url)


def test_a_server_that_stands_still_in_a_transaction_delays_the_others_for_a_while_only(
    postgres: PostgresServer, postgres_template: str
) -> None:
    url = postgres.new_database(postgres_template)
    still, other = Database(url), Database(url)
    limit: Future[str] = Future()
    others_have_looked, may_go_on = threading.Event(), threading.Event()

    def stand_still(tx: Transaction) -> None:
        take_lease(tx, "periodic", "still", 60_000)
        mark(tx)  # holds the end of the audit
        limit.set_result(tx.execute("SHOW idle_in_transaction_session_timeout").fetchone()[0])
        others_have_looked.wait(60)
        tx.execute("SET LOCAL idle_in_transaction_session_timeout = '1s'")  # the rest of the limit is over
        may_go_on.wait(60)

    pool = ThreadPoolExecutor(1)
    try:
        standing = pool.submit(still.write_and_wait, stand_still)
        either: list[Future[Any]] = [limit, standing]
        wait(either, 60, FIRST_COMPLETED)
        assert not standing.done(), standing.exception()
        assert limit.result(0) == f"{writer.IDLE_S:.0f}s"
        leader = HubLeader(other)
        assert not asyncio.run(leader.leads())
        others_have_looked.set()
        other.write_and_wait(mark)
        # PostgreSQL has ended the savepoint with the audit's lock, and may hold the row of the lease for a moment yet.
        until(lambda: asyncio.run(leader.leads()))
        may_go_on.set()
        with pytest.raises(Refusal, match="cannot be used now"):
            standing.result(60)
        assert marks(other) == 1
    finally:
        others_have_looked.set()
        may_go_on.set()
        pool.shutdown()
        still.close()
        other.close()
