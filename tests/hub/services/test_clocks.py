"""Clocks that jump by an hour, the hub's and its clients': no run is lost that beats, and nothing else either."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from skyward.errors import UsageError
from skyward.hub.model.batches import Batch
from skyward.hub.model.refusal import Reason
from skyward.hub.model.runs import RunState
from skyward.hub.services.hub import Hub
from skyward.hub.store import journal
from skyward.hub.store.database import Database
from tests.hub.postgres import PostgresServer
from tests.hub.services.hubs import ADA
from tests.hub.services.test_tracking import refused
from tests.waiting import until

HOUR_S = 3600
START_MS = 1_700_000_000_000


class Clocks:
    """A wall clock that can be set, and a steady one that nobody can set."""

    def __init__(self) -> None:
        self.passed_s, self.set_by_s = 0, 0

    def wall(self) -> int:
        return START_MS + (self.passed_s + self.set_by_s) * 1000

    def steady(self) -> float:
        return float(self.passed_s)


class Beating:
    """A run that sends a point and a heartbeat each ten seconds."""

    def __init__(self, hub: Hub, run_id: str) -> None:
        self.hub, self.id, self.step = hub, run_id, 0
        self.send(["run", {"experiment": "clocks", "name": run_id}])

    def send(self, *records: Any) -> RunState:
        batch = Batch("c", self.step + 1, records)
        self.step += len(records)
        return asyncio.run(self.hub.tracking.accept_batch(ADA, self.id, batch)).state

    def beat(self) -> None:
        self.send(["m", self.step, 7, {"loss": float(self.step)}])

    @property
    def state(self) -> RunState:
        return asyncio.run(self.hub.tracking.run(ADA, self.id)).state


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def hub(database_url: str, clocks: Clocks) -> Iterator[Hub]:
    database = Database(database_url, clock=clocks.wall)
    hub = Hub(database, None, steady=clocks.steady)
    hub.tracking.listening_since = clocks.wall()
    asyncio.run(hub.people.prepare("ada"))
    yield hub
    database.close()


def pass_time(clocks: Clocks, hub: Hub, seconds: int, *runs: Beating) -> list[str]:
    """Let time pass: the runs beat each 10 s, and the hub looks for lost ones each 5 s. Return the lost ones."""
    lost: list[str] = []
    for second in range(5, seconds + 1, 5):
        clocks.passed_s += 5
        lost += asyncio.run(hub.mark_lost())
        if second % 10 == 0:
            for run in runs:
                run.beat()
    return lost


@pytest.mark.parametrize("jumps", [(HOUR_S, -HOUR_S), (-HOUR_S, HOUR_S), (HOUR_S, HOUR_S, -2 * HOUR_S)])
def test_runs_that_beat_are_never_lost_when_the_clock_of_the_hub_jumps(
    hub: Hub, clocks: Clocks, jumps: tuple[int, ...]
) -> None:
    runs = [Beating(hub, name) for name in ("a", "b")]
    assert pass_time(clocks, hub, 100, *runs) == []
    for jump in jumps:
        clocks.set_by_s += jump
        assert pass_time(clocks, hub, 150, *runs) == []
    silent, beating = runs
    assert pass_time(clocks, hub, 150, beating) == ["a"]  # looking for lost ones goes on
    assert (silent.state, beating.state) == (RunState.LOST, RunState.RUNNING)
    for run in runs:
        history = asyncio.run(hub.tracking.history(ADA, run.id, "loss"))
        assert list(history.steps) == list(range(1, run.step))
    events = hub.database.read_and_wait(journal.events_behind, 0, 1000)
    kinds = [event.kind for event in events if event.resource == "run/a"]
    assert (kinds[0], kinds[-1], kinds.count("run.create"), kinds.count("run.lost")) == (
        "run.create", "run.lost", 1, 1,
    )  # fmt: skip
    owner = asyncio.run(hub.access.actor_named("ada", None))
    assert asyncio.run(hub.audit.verify(owner)) is None


def test_a_token_outlives_a_clock_that_is_ahead_for_a_while(hub: Hub, clocks: Clocks) -> None:
    owner = asyncio.run(hub.access.actor_named("ada", None))
    soon = clocks.wall() + HOUR_S * 500
    token = asyncio.run(hub.people.create_token(owner, "brief", expires_at=soon)).text
    code = asyncio.run(hub.access.sign_in_code("ada"))
    clocks.set_by_s += HOUR_S
    refused(hub.access.actor_for(token, None), Reason.UNAUTHENTICATED, "expired")
    refused(hub.access.sign_in(code), Reason.UNAUTHENTICATED, "too old")
    asyncio.run(hub.access.clean_up())
    clocks.set_by_s -= HOUR_S
    assert asyncio.run(hub.access.actor_for(token, None)).user == "ada"
    assert asyncio.run(hub.access.sign_in(code)).user == "ada"
    clocks.passed_s += 3 * 24 * HOUR_S
    asyncio.run(hub.access.clean_up())
    rows = hub.database.read_and_wait(lambda s: s.execute("SELECT kind FROM token").fetchall())
    assert [kind for (kind,) in rows] == ["session"]


def test_the_token_of_a_run_lives_until_the_hub_heard_of_its_end(hub: Hub, clocks: Clocks) -> None:
    run = Beating(hub, "a")
    token = asyncio.run(hub.people.create_run_token(ADA, "a")).text
    run.send(["s", "completed", clocks.wall() - HOUR_S * 1000, None])  # its client's clock is an hour behind
    assert asyncio.run(hub.access.actor_for(token, None)).run == "a"
    for _ in range(5):  # heartbeats behind the end do not prolong it
        clocks.passed_s += 15
        run.send()
    hub.access.forget()
    refused(hub.access.actor_for(token, None), Reason.UNAUTHENTICATED, "expired")


@pytest.mark.parametrize("skew_s", [-HOUR_S, HOUR_S])
def test_the_bill_of_a_pool_counts_by_one_clock(hub: Hub, clocks: Clocks, skew_s: int) -> None:
    def at() -> int:
        return clocks.wall() + skew_s * 1000

    def send(first: int, *records: Any) -> float:
        asyncio.run(hub.pools.accept_pool_batch(ADA, "e" * 32, Batch("c", first, records)))
        return spent()

    def spent() -> float:
        return asyncio.run(hub.pools.pool(ADA, "e" * 32)).pool.spent_usd

    hub.pools.clock = clocks.wall
    cost = {"price_usd_per_hour": 3600.0, "spent_usd": 0.0}
    send(1, ["pool", {"name": "p", "nodes": 1, "started_at": at()}], ["e", at(), "cost", None, cost])
    clocks.passed_s += 30
    assert spent() == pytest.approx(30)
    cost = {"price_usd_per_hour": 0.0, "spent_usd": 31.0}
    assert send(3, ["e", at(), "cost", None, cost], ["e", at(), "pool.closed", None, {}]) == 31.0


def test_servers_whose_clocks_differ_agree_on_lost_runs(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.new_database()
    servers = [Hub(Database(url), None, lost_after_s=60)]
    began_s, began_ns = time.time(), time.time_ns()
    monkeypatch.setattr(time, "time", lambda: began_s + HOUR_S)
    monkeypatch.setattr(time, "time_ns", lambda: began_ns + HOUR_S * 1_000_000_000)
    servers.append(Hub(Database(url), None, lost_after_s=60))
    try:
        assert abs(servers[1].database.clock() - began_ns // 1_000_000) < HOUR_S * 500
        for server in servers:
            asyncio.run(server.people.prepare("ada"))
            server.tracking.listening_since = 0  # both have run for long
        run = Beating(servers[0], "a")
        for hearing in servers:
            run.hub = hearing
            run.beat()
            assert [asyncio.run(server.mark_lost()) for server in servers] == [[], []]
        assert run.state is RunState.RUNNING
    finally:
        for server in servers:
            server.database.close()


def test_servers_whose_clocks_differ_seal_a_run_once(hub: Hub, clocks: Clocks, database_url: str) -> None:
    if not hub.database.is_postgresql:
        clocks.set_by_s += 24 * HOUR_S
        with pytest.raises(UsageError, match="has this database open"):  # one server, however old its lock looks
            Database(database_url, clock=clocks.wall)
        return
    run = Beating(hub, "a")
    for _ in range(30):
        run.send(*(["m", step, 7, {"loss": float(step)}] for step in range(run.step, run.step + 500)))
    other = Database(database_url, clock=lambda: clocks.wall() + HOUR_S * 1000)
    run.send(["s", "completed", clocks.wall(), None])
    number = hub.database.read_and_wait(lambda s: s.execute("SELECT pk FROM run").fetchone()[0])

    async def seal_both() -> None:
        await asyncio.gather(*(asyncio.to_thread(d.sealer.seal, number, merges=True) for d in (hub.database, other)))

    asyncio.run(seal_both())
    until(lambda: other.read_and_wait(lambda s: s.execute("SELECT count(*) FROM tail").fetchone()[0]) == 0)
    stored = other.read_and_wait(lambda s: s.execute("SELECT sum(points) FROM chunk").fetchone()[0])
    other.close()
    assert stored == 15_000
    assert len(asyncio.run(hub.tracking.history(ADA, "a", "loss")).steps) == 15_000
