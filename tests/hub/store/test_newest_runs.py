"""Newest runs of a project: the first page of a hub, which must not slow down with the number of runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from skyward.hub.model.runs import Lifecycle
from skyward.hub.model.search import RUNS, parse_order
from skyward.hub.services.tracking import Tracking
from skyward.hub.store import search
from skyward.hub.store.database import Database
from skyward.hub.store.transaction import Transaction
from tests.hub.services.hubs import ADA
from tests.hub.store.test_plans import Recorder


def test_the_newest_runs_of_a_project_are_read_in_the_order_of_an_index(database: Database) -> None:
    tracking = Tracking(database)

    async def fill() -> None:
        other = await tracking.create_experiment(ADA, "other")
        for number in range(30):
            await tracking.create_run(ADA, ("0", other.id)[number % 2], run_id=f"r{number}", started_at=number)

    def look(tx: Transaction) -> tuple[str, Sequence[Any]]:
        recorder = Recorder(tx)
        if recorder.is_postgresql:  # sorting 30 rows is cheaper; sorting all is what must not be needed
            tx.execute("SET LOCAL enable_sort = off")
            tx.execute("SET LOCAL enable_incremental_sort = off")
        order = parse_order(["attributes.start_time DESC"], RUNS)
        found = search.search_runs(recorder, 1, None, (), order, Lifecycle.ACTIVE, 3, 0)
        return next(plan for sql, plan in recorder.plans if "ORDER BY run.started_at" in sql), found

    asyncio.run(fill())
    plan, found = database.write_and_wait(look)
    assert [run.id for run in found] == ["r29", "r28", "r27"]
    assert "run_of_project_by_start" in plan
    assert "TEMP B-TREE" not in plan
    assert "Sort" not in plan
