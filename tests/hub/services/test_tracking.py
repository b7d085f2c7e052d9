"""Experiments, runs, parameters, tags and points, as services hand them out."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping
from dataclasses import replace

import pytest

from skyward.hub.model.access import Actor
from skyward.hub.model.refusal import Reason, Refusal
from skyward.hub.model.runs import DatasetInput, LatestMetric, Lifecycle, ModelLink, RunState
from skyward.hub.services.tracking import Tracking
from skyward.hub.store.database import Database
from skyward.hub.store.points import MANY
from skyward.hub.store.transaction import Transaction
from tests.hub.services.hubs import ADA, ADMIN, VIEWER, add_project, columns


def refused(call: object, reason: Reason, match: str) -> None:
    with pytest.raises(Refusal, match=match) as refusal:
        asyncio.run(call)  # type: ignore[arg-type]
    assert refusal.value.reason is reason


def test_the_experiment_of_mlflow_exists_from_the_first_day(database: Database) -> None:
    experiment = asyncio.run(Tracking(database).experiment(VIEWER, "0"))

    assert (experiment.name, experiment.artifact_location) == ("Default", "mlflow-artifacts:/0")


def test_an_experiment_is_made_renamed_tagged_and_found(database: Database) -> None:
    tracking = Tracking(database, clock=lambda: 5)

    async def run() -> None:
        made = await tracking.create_experiment(ADA, "vision", {"team": "red"})
        await tracking.set_experiment_tag(ADA, made.id, "goal", "sota")
        await tracking.delete_experiment_tag(ADA, made.id, "team")
        await tracking.update_experiment(ADA, made.id, "vision-2")
        found = await tracking.experiment_named(VIEWER, "vision-2")
        assert (found.id, dict(found.tags), found.owner) == (made.id, {"goal": "sota"}, "ada")

    asyncio.run(run())
    refused(tracking.experiment_named(ADA, "vision"), Reason.MISSING, "Could not find experiment with name 'vision'")
    refused(tracking.create_experiment(ADA, "vision-2"), Reason.EXISTS, "already exists and is active")
    refused(tracking.create_experiment(ADA, " "), Reason.INVALID, "must be a text that is not empty")
    refused(tracking.create_experiment(VIEWER, "x"), Reason.FORBIDDEN, "may not write")
    refused(tracking.create_experiment(ADA, "x", None, "file:///etc"), Reason.INVALID, "must be a URI of an object")
    refused(tracking.experiment(ADA, "12" * 4), Reason.MISSING, "No Experiment with id=12121212 exists")
    refused(tracking.experiment(ADA, "12a"), Reason.INVALID, "Experiment ID must be a valid integer")


def test_a_deleted_experiment_takes_its_runs_along_and_brings_them_back(database: Database) -> None:
    tracking = Tracking(database)

    async def run() -> None:
        experiment = await tracking.create_experiment(ADA, "vision")
        made = await tracking.create_run(ADA, experiment.id)
        await tracking.delete_experiment(ADA, experiment.id)
        assert (await tracking.run(ADA, made.id)).lifecycle is Lifecycle.DELETED
        with pytest.raises(Refusal, match="must be in the 'active' state"):
            await tracking.create_run(ADA, experiment.id)
        with pytest.raises(Refusal, match="already exists and is deleted; restore that one"):
            await tracking.create_experiment(ADA, "vision")
        await tracking.restore_experiment(ADA, experiment.id)
        assert (await tracking.run(ADA, made.id)).lifecycle is Lifecycle.ACTIVE

    asyncio.run(run())


def test_others_need_an_admin_to_delete(database: Database) -> None:
    tracking = Tracking(database)
    made = asyncio.run(tracking.create_run(ADMIN, "0"))

    refused(tracking.delete_run(ADA, made.id), Reason.FORBIDDEN, "may not delete")
    refused(tracking.delete_experiment(ADA, "0"), Reason.FORBIDDEN, "may not delete")
    asyncio.run(tracking.delete_run(ADMIN, made.id))


def test_a_run_keeps_what_it_was_given(database: Database) -> None:
    tracking = Tracking(database)
    dataset = DatasetInput("mnist", "d1", "local", "here", tags={"mlflow.data.context": "train"})

    async def run() -> None:
        made = await tracking.create_run(ADA, "0", name="first", started_at=7, tags={"a": "1"}, params={"lr": "0.1"})
        await tracking.log_params(ADA, made.id, {"lr": "0.1", "depth": "4"})
        await tracking.set_tags(ADA, made.id, {"b": "2", "mlflow.runName": "second"})
        await tracking.delete_tag(ADA, made.id, "a")
        await tracking.log_inputs(ADA, made.id, [dataset, dataset], [ModelLink("m-1", "output", 3)])
        await tracking.log_points(
            ADA, made.id, columns(("loss", 1, 10, 0.5), ("loss", 2, 9, math.nan), ("acc", 1, 1, 1))
        )
        found = await tracking.run(VIEWER, made.id)
        assert (found.name, found.started_at, found.state) == ("second", 7, RunState.RUNNING)
        assert found.params == {"lr": "0.1", "depth": "4"}
        assert found.tags == {"b": "2", "mlflow.runName": "second"}
        assert [(metric.key, metric.step, metric.timestamp) for metric in found.metrics] == [
            ("acc", 1, 1),
            ("loss", 2, 9),
        ]
        assert math.isnan(found.metrics[1].value)
        assert (list(found.inputs), list(found.models)) == ([dataset], [ModelLink("m-1", "output", 3)])
        assert found.artifact_uri == f"mlflow-artifacts:/0/{made.id}/artifacts"

    asyncio.run(run())


def test_a_parameter_never_changes(database: Database) -> None:
    tracking = Tracking(database)
    made = asyncio.run(tracking.create_run(ADA, "0", params={"lr": "1"}))

    refused(
        tracking.log_params(ADA, made.id, {"a": "1", "lr": "2"}), Reason.INVALID, "Changing param values is not allowed"
    )
    assert asyncio.run(tracking.run(ADA, made.id)).params == {"lr": "1"}


def test_a_batch_is_logged_wholly_or_not_at_all(database: Database) -> None:
    tracking = Tracking(database)
    made = asyncio.run(tracking.create_run(ADA, "0", params={"lr": "1"}))

    refused(
        tracking.log_batch(ADA, made.id, columns(("loss", 1, 1, 1.0)), {"lr": "2"}, {"t": "x"}), Reason.INVALID, "lr"
    )
    found = asyncio.run(tracking.run(ADA, made.id))
    assert (found.metrics, "t" in found.tags) == ((), False)


def test_long_values_are_cut_and_bad_names_refused(database: Database) -> None:
    tracking = Tracking(database)
    made = asyncio.run(tracking.create_run(ADA, "0"))

    asyncio.run(tracking.log_batch(ADA, made.id, columns(), {"p": "x" * 7000}, {"t": "y" * 9000}))
    found = asyncio.run(tracking.run(ADA, made.id))
    assert (len(found.params["p"]), len(found.tags["t"])) == (6000, 8000)
    for key in ("", "../up", "/root", "a//b", "a\x00", "k" * 251, "a;b"):
        refused(tracking.log_params(ADA, made.id, {key: "1"}), Reason.INVALID, "params.key=")
        refused(tracking.log_points(ADA, made.id, columns((key, 1, 1, 1.0))), Reason.INVALID, "metrics.key=")


def test_the_same_run_made_twice_is_one_run(database: Database) -> None:
    tracking = Tracking(database)
    first = asyncio.run(tracking.create_run(ADA, "0", run_id="a" * 32, name="n"))

    assert asyncio.run(tracking.create_run(ADA, "0", run_id="a" * 32, name="other")) == first
    refused(tracking.create_run(ADMIN, "0", run_id="a" * 32), Reason.EXISTS, "already exists")
    refused(tracking.create_run(ADA, "0", run_id="../x"), Reason.INVALID, "run_id=")


def test_a_run_that_ends_has_an_end(database: Database) -> None:
    tracking = Tracking(database)
    made = asyncio.run(tracking.create_run(ADA, "0"))

    done = asyncio.run(tracking.update_run(ADA, made.id, state=RunState.FAILED, error="boom"))
    assert (done.state, done.error, done.ended_at is not None) == (RunState.FAILED, "boom", True)
    again = asyncio.run(tracking.update_run(ADA, made.id, state=RunState.COMPLETED, ended_at=99, name="n"))
    assert (again.state, again.ended_at, again.tags["mlflow.runName"]) == (RunState.COMPLETED, 99, "n")


def test_a_deleted_run_takes_no_points(database: Database) -> None:
    tracking = Tracking(database)
    made = asyncio.run(tracking.create_run(ADA, "0"))
    asyncio.run(tracking.delete_run(ADA, made.id))

    refused(
        tracking.log_points(ADA, made.id, columns(("a", 1, 1, 1.0))), Reason.INVALID, "must be in the 'active' state"
    )
    asyncio.run(tracking.restore_run(ADA, made.id))
    asyncio.run(tracking.log_points(ADA, made.id, columns(("a", 1, 1, 1.0))))


def test_a_run_that_the_same_commit_deletes_takes_no_points_from_then_on(database: Database) -> None:
    tracking = Tracking(database)
    runs = [asyncio.run(tracking.create_run(ADA, "0")).id for _ in range(2)]
    point, is_waiting, goes_on = columns(("a", 1, 1, 1.0)), threading.Event(), threading.Event()

    def wait(_tx: Transaction) -> None:
        is_waiting.set()
        goes_on.wait(60)

    async def log() -> list[object]:
        held = asyncio.create_task(database.write(wait))
        await asyncio.to_thread(is_waiting.wait, 30)
        calls = [tracking.log_points(ADA, run, point) for run in runs]
        calls += [tracking.delete_run(ADA, runs[0]), tracking.log_points(ADA, runs[0], point)]
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)
        goes_on.set()
        await held
        return await asyncio.gather(*tasks, return_exceptions=True)

    *done, refusal = asyncio.run(log())
    assert done == [None] * 3
    assert "must be in the 'active' state" in str(refusal)


def test_things_of_another_project_are_missing(database: Database) -> None:
    tracking = Tracking(database)
    made = asyncio.run(tracking.create_run(ADA, "0"))
    foreign = replace(ADMIN, project=add_project(database, "other"))

    refused(tracking.run(foreign, made.id), Reason.MISSING, "not found")
    refused(tracking.experiment(foreign, "0"), Reason.MISSING, "No Experiment")
    refused(tracking.log_points(foreign, made.id, columns(("a", 1, 1, 1.0))), Reason.MISSING, "not found")
    refused(tracking.create_run(foreign, "0"), Reason.MISSING, "No Experiment")
    refused(tracking.history(foreign, made.id, "a"), Reason.MISSING, "not found")
    refused(tracking.delete_run(foreign, made.id), Reason.MISSING, "not found")


def test_the_token_of_a_run_reaches_that_run_only(database: Database) -> None:
    tracking = Tracking(database)
    made = asyncio.run(tracking.create_run(ADA, "0"))
    other = asyncio.run(tracking.create_run(ADA, "0"))
    bound = replace(ADA, run=made.id)

    asyncio.run(tracking.log_points(bound, made.id, columns(("a", 1, 1, 1.0))))
    refused(tracking.log_points(bound, other.id, columns(("a", 1, 1, 1.0))), Reason.MISSING, "not found")
    refused(tracking.create_run(bound, "0"), Reason.MISSING, "not found")
    refused(tracking.create_experiment(bound, "x"), Reason.FORBIDDEN, "of one run")


def test_latest_is_the_greatest_by_step_time_and_value(database: Database) -> None:
    tracking = Tracking(database)
    made = asyncio.run(tracking.create_run(ADA, "0"))

    async def run() -> None:
        for point in [("a", 5, 1, 1.0), ("a", 4, 9, 9.0), ("a", 5, 2, 0.5), ("a", 5, 2, 0.1), ("a", 5, 0, 7.0)]:
            await tracking.log_points(ADA, made.id, columns(point))
        await tracking.log_points(ADA, made.id, columns(("b", 1, 1, math.inf), ("b", 0, 9, 1.0)))

    asyncio.run(run())
    metrics = asyncio.run(tracking.run(ADA, made.id)).metrics
    assert [(m.key, m.step, m.timestamp, m.value) for m in metrics] == [
        ("a", 5, 2, 0.5),
        ("b", 1, 1, 1.7976931348623157e308),
    ]


def test_many_points_have_the_same_latest_as_few(database: Database) -> None:
    tracking = Tracking(database)
    few, many = (asyncio.run(tracking.create_run(ADA, "0")).id for _ in range(2))
    numbers = (math.nan, -0.0, 0.0, 1.5, -1.5, math.inf, -math.inf)
    points = [(f"m{place % 5}", place * 7 % 11 - 5, place * 3 % 4, numbers[place * 5 % 7]) for place in range(MANY * 4)]

    async def log() -> list[list[LatestMetric]]:
        for point in points:
            await tracking.log_points(ADA, few, columns(point))
        await tracking.log_points(ADA, many, columns(*points))
        return [sorted((await tracking.run(ADA, run)).metrics, key=lambda metric: metric.key) for run in (few, many)]

    one_by_one, at_once = asyncio.run(log())
    assert len(at_once) == 5
    assert repr(at_once) == repr(one_by_one)  # NaN is not equal to itself


def test_a_dataset_has_bounds(database: Database) -> None:
    tracking = Tracking(database)
    made = asyncio.run(tracking.create_run(ADA, "0"))
    legal = DatasetInput("n" * 500, "d" * 128, "local", "{}", tags={"k" * 255: "v" * 500})
    asyncio.run(tracking.log_inputs(ADA, made.id, [legal], []))
    for change, message in (
        ({"name": "n" * 501}, "has 501 characters; use at most 500"),
        ({"digest": "d" * 129}, "use at most 128"),
        ({"source": "s" * 65_536}, "use at most 65535"),
        ({"tags": {"k" * 256: "v"}}, "use at most 255"),
        ({"tags": {"k": "v" * 501}}, "use at most 500"),
        ({"profile": "\0"}, "has a character that is no text"),
    ):
        refused(tracking.log_inputs(ADA, made.id, [replace(legal, **change)], []), Reason.INVALID, message)


def test_a_history_is_sorted_without_duplicates_and_paged(database: Database) -> None:
    tracking = Tracking(database)
    made = asyncio.run(tracking.create_run(ADA, "0"))
    points = [("a", step, 100 - step // 2, float(step % 3)) for step in range(40)]

    async def run() -> None:
        await tracking.log_points(ADA, made.id, columns(*points))
        await tracking.log_points(ADA, made.id, columns(*points[:10], ("b", 1, 1, 1.0), ("a", 3, 50, math.nan)))
        await tracking.log_points(ADA, made.id, columns(("a", 3, 50, 1.0), ("a", 3, 50, 0.0), ("a", 3, 50, -1.0)))
        whole = await tracking.history(ADA, made.id, "a")
        assert repr(whole) == "History(key='a', points=44, next_token=None)"
        found = list(zip(whole.timestamps, whole.steps, map(str, whole.values), strict=True))
        assert [(at, step) for at, step, _ in found] == sorted(
            [*((at, step) for _, step, at, _ in points), *[(50, 3)] * 4]
        )
        assert found[:4] == [(50, 3, "-1.0"), (50, 3, "0.0"), (50, 3, "nan"), (50, 3, "1.0")]
        for limit in (1, 2, 3, 7):
            paged: list[tuple[int, int, str]] = []
            token = None
            while not paged or token is not None:
                page = await tracking.history(ADA, made.id, "a", limit=limit, page_token=token)
                paged += list(zip(page.timestamps, page.steps, map(str, page.values), strict=True))
                token = page.next_token
                assert len(page) == limit or token is None
            assert paged == found
        part = await tracking.history(ADA, made.id, "a", start=10, end=12)
        assert sorted(part.steps) == [10, 11, 12]
        assert len(await tracking.history(ADA, made.id, "nothing")) == 0

    asyncio.run(run())
    refused(tracking.history(ADA, made.id, "a", page_token="x"), Reason.INVALID, "page_token='x'")


def test_a_thinned_history_keeps_its_peaks_and_ends(database: Database) -> None:
    tracking = Tracking(database)
    made = asyncio.run(tracking.create_run(ADA, "0"))
    values = [math.sin(step / 50) for step in range(1000)]
    values[333], values[777] = 10.0, -10.0

    async def run() -> None:
        points = columns(*(("a", step, step, value) for step, value in enumerate(values)))
        await tracking.log_points(ADA, made.id, points)
        thinned = await tracking.history(ADA, made.id, "a", at_most=50)
        assert len(thinned) <= 50
        assert {0, 333, 777, 999} <= set(thinned.steps)

    asyncio.run(run())


def test_changes_are_reported_once_each_and_points_once_for_a_run(database: Database) -> None:
    seen: list[tuple[str, str, str]] = []

    def note(_tx: Transaction, actor: Actor, action: str, resource: str, _detail: Mapping[str, object]) -> None:
        seen.append((actor.user, action, resource))

    tracking = Tracking(database, on_change=note)

    async def run() -> None:
        made = await tracking.create_run(ADA, "0", run_id="r1")
        for step in range(3):
            await tracking.log_points(ADA, made.id, columns(("a", step, 1, 1.0)))
        await tracking.update_run(ADA, made.id, state=RunState.COMPLETED)

    asyncio.run(run())
    assert seen == [("ada", action, "run/r1") for action in ("run.create", "run.points", "run.update")]
