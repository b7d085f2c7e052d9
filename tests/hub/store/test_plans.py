"""Plans of the databases for the hot statements: none walks over a table."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest

from skyward.hub.model.quotas import Quota
from skyward.hub.model.runs import Lifecycle
from skyward.hub.model.search import RUNS, parse_filter, parse_order
from skyward.hub.services.registry import Registry
from skyward.hub.services.tracking import Tracking
from skyward.hub.store import artifacts, leases, logged_models, pools, quotas, runs, sealing, search
from skyward.hub.store.arrivals import Arrivals
from skyward.hub.store.database import Database
from skyward.hub.store.history import read_history
from skyward.hub.store.points import has_points
from skyward.hub.store.pools import PoolRow
from skyward.hub.store.transaction import Transaction
from tests.hub.services.hubs import ADA, columns

EXPLAINED = ("SELECT", "UPDATE", "DELETE")


class Recorder(Transaction):
    """A transaction that asks the database for the plan of each statement before it runs it."""

    def __init__(self, tx: Transaction) -> None:
        super().__init__(tx.connection, tx.now, tx.keys, set())
        self.plans: list[tuple[str, str]] = []
        if self.is_postgresql:  # with few rows it prefers a scan; where none is needed, it now takes an index
            super().execute("SET LOCAL enable_seqscan = off")

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> Any:
        if sql.lstrip().startswith(EXPLAINED):
            word = "EXPLAIN" if self.is_postgresql else "EXPLAIN QUERY PLAN"
            rows = super().execute(f"{word} {sql}", parameters).fetchall()
            self.plans.append((sql, "\n".join(str(row[-1]) for row in rows)))
        return super().execute(sql, parameters)


def scans(tx: Recorder) -> list[str]:
    """Return the statements whose plan walks over a table."""
    pattern = "Seq Scan" if tx.is_postgresql else r"^SCAN (?!CONSTANT|\(|SUBQUERY)"
    return [f"{sql}\n{plan}" for sql, plan in tx.plans if re.search(pattern, plan, re.MULTILINE)]


@pytest.fixture
def filled(database: Database) -> Database:
    tracking = Tracking(database)

    async def fill() -> None:
        for number in range(30):
            run_id = f"r{number}"
            await tracking.create_run(ADA, "0", run_id=run_id, params={"lr": str(number)}, tags={"team": "red"})
            await tracking.log_points(ADA, run_id, columns(("loss", 1, 1, number / 7), ("acc", 1, 1, 1.0)))

    asyncio.run(fill())
    return database


def look(tx: Recorder) -> None:
    """Run the statements that requests for single things run."""
    row = runs.find_run(tx, 1, "r3")
    assert row is not None
    runs.look_up(tx, {(1, "r3"), (1, "r4")})
    runs.load_run(tx, 1, "r3")
    has_points(tx, row.pk)
    read_history(tx, 1, row.pk, "loss", start=0, end=9, limit=5)
    artifacts.last_accepted(tx, row.pk, "c")
    artifacts.set_last_accepted(tx, row.pk, "c", 3)
    artifacts.load_commands(tx, row.pk, only_open=True)
    artifacts.list_artifacts(tx, row.pk, "a")
    artifacts.find_artifact(tx, row.pk, "a")
    artifacts.has_blob(tx, 1, "0" * 64, 1)
    runs.change_run(tx, row.pk, heartbeat_at=1)
    runs.add_params(tx, 1, row.pk, {"lr": "3", "new": "1"})
    runs.change_tags(tx, 1, row.pk, {"a": "1"}, ["team"])
    runs.mark_lost(tx, 0)
    fence = leases.take_lease(tx, "periodic", "me", 1000)
    assert fence is not None
    leases.need_lease(tx, "periodic", fence)
    leases.give_up_lease(tx, "periodic", fence)
    for quota in Quota:
        quotas.set_limit(tx, 1, quota, 1000)
        quotas.charge(tx, 1, quota, 1)
    quotas.limits_of(tx, 1)
    sealed = sealing.prepare_seal(tx, row.pk)
    assert sealed is not None
    sealing.apply_seal(tx, row.pk, sealed)
    sealing.prepare_merge(tx, row.pk)
    sealing.cut_points(tx, row.pk, 0)


def test_no_statement_for_a_single_thing_walks_over_a_table(filled: Database) -> None:
    def operation(tx: Transaction) -> list[str]:
        recorder = Recorder(tx)
        arrivals = Arrivals()
        arrivals.begin(tx)  # walks from the end, over 1,000 rows at most
        arrivals.read(recorder, lambda *_: True)
        look(recorder)
        assert len(recorder.plans) > 20
        return scans(recorder)

    assert filled.write_and_wait(operation) == []


@pytest.mark.parametrize(
    ("filter_", "order_by"),
    [
        ("", []),
        ("", ["metrics.loss DESC"]),
        ("metrics.loss < 1 AND params.lr = '3'", ["metrics.acc"]),
        ("tags.team LIKE 'r%'", ["params.lr"]),
        ("params.lr = '3' AND status = 'RUNNING'", ["start_time DESC"]),
        ("dataset.name = 'x'", ["tags.team", "metrics.loss"]),
    ],
)
def test_no_search_of_runs_walks_over_a_table(filled: Database, filter_: str, order_by: list[str]) -> None:
    def operation(tx: Transaction) -> list[str]:
        recorder = Recorder(tx)
        comparisons, orders = parse_filter(filter_, RUNS), parse_order(order_by, RUNS)
        search.search_runs(recorder, 1, [0], comparisons, orders, Lifecycle.ACTIVE, 5, 0)
        return scans(recorder)

    assert filled.write_and_wait(operation) == []


def test_a_page_ordered_by_a_metric_follows_the_index_of_its_values(filled: Database) -> None:
    def operation(tx: Transaction) -> str:
        recorder = Recorder(tx)
        if recorder.is_postgresql:  # sorting 30 rows is cheaper; sorting all is what must not be needed
            tx.execute("SET LOCAL enable_sort = off")
        search.search_runs(recorder, 1, [0], (), parse_order(["metrics.loss"], RUNS), Lifecycle.ACTIVE, 5, 0)
        return next(plan for sql, plan in recorder.plans if "ORDER BY o0.value" in sql)

    assert "latest_by_value" in filled.write_and_wait(operation)


def test_the_newest_runs_are_read_in_the_order_of_their_index(filled: Database) -> None:
    def operation(tx: Transaction) -> str:
        recorder = Recorder(tx)
        search.search_runs(recorder, 1, [0], (), (), Lifecycle.ACTIVE, 5, 0)
        return next(plan for sql, plan in recorder.plans if "ORDER BY run.started_at" in sql)

    plan = filled.write_and_wait(operation)
    assert "run_by_start" in plan
    assert "TEMP B-TREE" not in plan
    assert "Sort" not in plan


# Pools and models -----------------------------------------------------------------------------------------------------


def add_pools(tx: Transaction) -> None:
    """Add pools with some events, most of which are calls."""
    for number in range(10):
        row = PoolRow(
            f"{number:032x}", "p", "local", "ada", 1, started_at=number, heard_at=0, cost_at=0, client="c", state="open"
        )
        assert pools.add_pool(tx, 1, row)
        kinds = ["node.ready", *["call.began", "call"] * 20, "cost"]
        pools.add_events(tx, row.pk, [(at, at, kind, 0, {}) for at, kind in enumerate(kinds, 1)])


def test_no_statement_about_pools_walks_over_a_table_or_sorts_the_events_of_a_pool(database: Database) -> None:
    def operation(tx: Transaction) -> list[str]:
        add_pools(tx)
        if tx.is_postgresql:
            tx.execute("ANALYZE pool_event")
            tx.execute("SET LOCAL enable_sort = off")  # sorting 40 rows is cheaper; sorting all is what must not be
        recorder = Recorder(tx)
        row = pools.find_pool(recorder, 1, f"{3:032x}")
        assert row is not None
        pools.update_pool(recorder, row)
        assert [found.started_at for found in pools.pools_before(recorder, 1, 3, (5, 2**62))] == [5, 4, 3]
        assert [event.kind for event in pools.events_of(recorder, row.pk, 5)] == ["node.ready", "cost"]
        assert [event.number for event in pools.calls_of(recorder, row.pk, 3)] == [39, 40, 41]
        plans = dict(recorder.plans)
        (of_rest,) = [plan for sql, plan in plans.items() if "NOT IN" in sql]
        assert "pool_event_of_rest" in of_rest
        assert not any("TEMP B-TREE" in plan or "Sort" in plan for plan in plans.values())
        return scans(recorder)

    assert database.write_and_wait(operation) == []


def test_the_newest_logged_models_are_read_in_the_order_of_their_index(database: Database) -> None:
    models = Registry(database)

    async def fill() -> None:
        for number in range(30):
            await models.create_logged_model(ADA, "0", name=f"m{number}")

    def operation(tx: Transaction) -> list[str]:
        recorder = Recorder(tx)
        assert len(logged_models.search_logged_models(recorder, 1, [0], (), (), (), 5, 0)) == 5
        plan = next(plan for sql, plan in recorder.plans if "ORDER BY logged_model.created_at" in sql)
        assert "logged_model_by_creation" in plan
        assert "TEMP B-TREE" not in plan
        assert "Sort" not in plan
        return scans(recorder)

    asyncio.run(fill())
    assert database.write_and_wait(operation) == []
