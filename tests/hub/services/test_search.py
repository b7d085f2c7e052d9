"""Searches of runs and experiments in real databases."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from skyward.hub.model.refusal import Refusal
from skyward.hub.model.runs import DatasetInput, RunState
from skyward.hub.services.search import View
from skyward.hub.services.tracking import Tracking
from skyward.hub.store import search
from skyward.hub.store.database import Database
from tests.hub.services.hubs import ADA, ADMIN, add_project, columns

LOSSES: Sequence[float | None] = (0.5, 0.1, math.nan, None, 0.3)


@pytest.fixture
def tracking(database: Database) -> Tracking:
    """Five runs r0 to r4 of experiment 0, which differ in all that can be searched."""
    tracking = Tracking(database)

    async def fill() -> None:
        for number, loss in enumerate(LOSSES):
            run_id = f"r{number}"
            await tracking.create_run(
                ADA if number % 2 else ADMIN,
                "0",
                run_id=run_id,
                name=f"Name {number}",
                started_at=100 + number,
                params={"lr": f"0.{number}", **({"only": "x"} if number == 2 else {})},
                tags={"team": "Red" if number < 3 else "blue_1"},
            )
            if loss is not None:
                await tracking.log_points(ADA, run_id, columns(("loss", 1, 1, loss), ("a b", 1, 1, number)))
        await tracking.update_run(ADA, "r1", state=RunState.COMPLETED, ended_at=500)
        await tracking.log_inputs(
            ADA, "r4", [DatasetInput("mnist", "d", "l", "s", tags={"mlflow.data.context": "t"})], []
        )
        await tracking.delete_run(ADMIN, "r0")

    asyncio.run(fill())
    return tracking


def found(tracking: Tracking, filter: str = "", order_by: Sequence[str] = (), view: View = View.ALL) -> str:  # noqa: A002
    page = asyncio.run(tracking.search_runs(ADA, ["0"], filter, order_by, view=view))
    return " ".join(run.id[1:] for run in page.items)


@pytest.mark.parametrize(
    ("filter_", "expected"),
    [
        ("", "4 3 2 1 0"),
        ("metrics.loss < 0.4", "4 1"),
        ("metrics.loss != 0.3", "2 1 0"),
        ("metrics.`a b` >= 2", "4 2"),
        ("metrics.unknown < 1", ""),
        ("params.lr = '0.3'", "3"),
        ("params.lr != '0.3'", "4 2 1 0"),
        ("params.only IS NULL", "4 3 1 0"),
        ("params.only IS NOT NULL", "2"),
        ("params.unknown IS NULL", "4 3 2 1 0"),
        ("tags.team LIKE 'R%'", "2 1 0"),
        ("tags.team LIKE 'r%'", ""),
        ("tags.team ILIKE 'r%'", "2 1 0"),
        ("tags.team LIKE 'blue\\_1'", ""),
        ("status = 'FINISHED'", "1"),
        ("status = 'completed'", "1"),
        ("status != 'FINISHED'", "4 3 2 0"),
        ("status IN ('FINISHED', 'running')", "4 3 2 1 0"),
        ("status LIKE 'FIN%'", "1"),
        ("run_name = 'Name 3'", "3"),
        ("run_id NOT IN ('r0', 'r1')", "4 3 2"),
        ("user_id = 'ada'", "3 1"),
        ("start_time >= 102 AND start_time < 104", "3 2"),
        ("end_time > 1", "1"),
        ("artifact_uri LIKE 'mlflow-artifacts:/0/r2/%'", "2"),
        ("dataset.name = 'mnist' AND dataset.context = 't'", "4"),
        ("dataset.digest IN ('x')", ""),
        ("tags.team = 'Red' AND metrics.loss > 0.2 AND params.lr LIKE '0._'", "0"),
    ],
)
def test_a_filter_finds_the_runs_it_describes(tracking: Tracking, filter_: str, expected: str) -> None:
    assert found(tracking, filter_) == expected


@pytest.mark.parametrize(
    ("order_by", "expected"),
    [
        (["metrics.loss"], "1 4 0 2 3"),
        (["metrics.loss DESC"], "0 4 1 2 3"),
        (["metrics.unknown", "start_time"], "0 1 2 3 4"),
        (["params.lr DESC"], "4 3 2 1 0"),
        (["params.only", "start_time ASC"], "2 0 1 3 4"),
        (["tags.team", "metrics.loss"], "1 0 2 4 3"),
        (["end_time"], "1 4 3 2 0"),
        (["run_name DESC"], "4 3 2 1 0"),
        (["status", "run_id"], "1 0 2 3 4"),
    ],
)
def test_runs_are_ordered_with_nan_behind_numbers_and_missing_last(
    tracking: Tracking, order_by: list[str], expected: str
) -> None:
    assert found(tracking, order_by=order_by) == expected


@pytest.mark.parametrize("listed", [0, 2, 3])
def test_a_common_value_finds_the_same_runs_as_a_rare_one(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch, listed: int
) -> None:
    monkeypatch.setattr(search, "MOST_LISTED", listed)
    assert found(tracking, "tags.team = 'Red'") == "2 1 0"
    assert found(tracking, "tags.team = 'Red' AND params.lr = '0.1'", ["metrics.loss DESC"]) == "1"
    assert found(tracking, "tags.team = 'red'") == ""


def test_pages_join_to_the_whole_list(tracking: Tracking) -> None:
    for order_by in ([], ["metrics.loss DESC"], ["params.only"]):
        ids, token = [], None
        while True:
            page = asyncio.run(tracking.search_runs(ADA, ["0"], "", order_by, 2, token, View.ALL))
            ids += [run.id[1:] for run in page.items]
            token = page.next_token
            if token is None:
                break
        assert " ".join(ids) == found(tracking, order_by=order_by)


def test_views_separate_active_from_deleted_runs(tracking: Tracking) -> None:
    assert found(tracking, view=View.ACTIVE) == "4 3 2 1"
    assert found(tracking, view=View.DELETED) == "0"


def test_a_search_stays_in_its_project(tracking: Tracking, database: Database) -> None:
    foreign = replace(ADMIN, project=add_project(database, "other"))

    for experiments in (["0"], None, []):
        assert not asyncio.run(tracking.search_runs(foreign, experiments)).items
    assert not asyncio.run(tracking.search_experiments(foreign)).items


def test_experiments_are_searched_and_ordered(database: Database) -> None:
    ticks = iter(range(1, 100))
    tracking = Tracking(database)

    async def run() -> None:
        for name in ("vision", "Audio", "text"):
            await tracking.create_experiment(ADA, name, {"team": name[0]})
            next(ticks)
        await tracking.delete_experiment(ADA, "3")

        async def names(filter_: str = "", order_by: Sequence[str] = (), view: View = View.ACTIVE) -> list[str]:
            page = await tracking.search_experiments(ADA, filter_, order_by, view=view)
            return [experiment.name for experiment in page.items]

        assert set(await names()) == {"vision", "Audio", "Default"}
        assert await names(view=View.DELETED) == ["text"]
        assert await names("name LIKE 'v%'") == ["vision"]
        assert await names("name ILIKE 'a%' AND tags.team = 'A'") == ["Audio"]
        assert await names("tags.team IS NULL") == ["Default"]
        assert await names("experiment_id = '2'") == ["Audio"]
        assert await names(order_by=["name ASC"]) == ["Audio", "Default", "vision"]

    asyncio.run(run())


def test_limits_and_tokens_are_checked(tracking: Tracking) -> None:
    for limit in (0, 50_001):
        with pytest.raises(Refusal, match=f"limit={limit}"):
            asyncio.run(tracking.search_runs(ADA, ["0"], limit=limit))
    with pytest.raises(Refusal, match="page_token="):
        asyncio.run(tracking.search_runs(ADA, ["0"], page_token="W10="))


def test_many_wildcards_for_a_state_take_no_time(tracking: Tracking) -> None:
    began = time.monotonic()
    assert found(tracking, " AND ".join([f"status LIKE '{'%' * 16}x'"] * 100)) == ""
    assert found(tracking, "status ILIKE '%in_s%d'") == "1"
    assert time.monotonic() - began < 60  # without care, longer than anybody waits
