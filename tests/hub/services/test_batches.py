"""Numbered records: exactly once, in any order of arrival."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from skyward.hub.model.batches import Batch
from skyward.hub.model.refusal import Reason, Refusal
from skyward.hub.model.runs import RunState
from skyward.hub.services.tracking import Tracking
from skyward.hub.store.database import Database
from tests.hub.services.hubs import ADA

RUN = [
    "run",
    {"experiment": "vision", "name": "first", "user": "ada", "started_at": 5, "tags": {"a": 1}, "parent": "p"},
]


class Clock:
    """A clock that a test turns."""

    now = 1_000_000

    def __call__(self) -> int:
        return self.now


def accept(tracking: Tracking, first: int, *records: Sequence[Any], client: str = "c") -> Any:
    return asyncio.run(tracking.accept_batch(ADA, "r1", Batch(client, first, records)))


def steps(tracking: Tracking, key: str = "loss") -> list[int]:
    return list(asyncio.run(tracking.history(ADA, "r1", key)).steps)


def test_the_first_record_makes_the_experiment_and_the_run(database: Database) -> None:
    tracking = Tracking(database)
    answer = accept(tracking, 1, RUN, ["m", 1, 10, {"loss": 0.5, "acc": "NaN"}], ["p", {"lr": 0.1}], ["t", {"b": "x"}])

    run = asyncio.run(tracking.run(ADA, "r1"))
    assert (answer.accepted, answer.state, answer.refused) == (4, RunState.RUNNING, [])
    assert (run.name, run.started_at, run.params) == ("first", 5, {"lr": "0.1"})
    expected = {"a": "1", "b": "x", "mlflow.parentRunId": "p", "mlflow.user": "ada", "mlflow.runName": "first"}
    assert run.tags == expected
    assert asyncio.run(tracking.experiment_named(ADA, "vision")).id == run.experiment_id


def test_batches_that_come_again_or_out_of_order_count_once(database: Database) -> None:
    tracking = Tracking(database)
    records = [RUN] + [["m", step, 7, {"loss": float(step)}] for step in range(1, 60)]
    arrivals = [(first, records[first - 1 : first + 4]) for first in range(1, 60, 3)] * 10
    random.Random(3).shuffle(arrivals)

    async def run() -> None:
        accepted = 0
        for _ in range(2):
            for first, part in arrivals:
                answer = await tracking.accept_batch(ADA, "r1", Batch("c", first, part))
                accepted = max(accepted, answer.accepted)
        assert accepted == 60

    asyncio.run(run())
    assert steps(tracking) == list(range(1, 60))
    rows = database.read_and_wait(lambda s: s.execute("SELECT sum(points) FROM tail").fetchone())
    assert rows[0] == 59


def test_records_behind_a_gap_are_not_accepted(database: Database) -> None:
    tracking = Tracking(database)
    assert accept(tracking, 2, ["m", 1, 1, {"loss": 1}]).accepted == 0
    accept(tracking, 1, RUN)
    assert accept(tracking, 3, ["m", 1, 1, {"loss": 1}]).accepted == 1
    assert steps(tracking) == []


def test_a_record_that_can_never_be_accepted_holds_nobody_up(database: Database) -> None:
    tracking = Tracking(database)
    accept(tracking, 1, RUN, ["p", {"lr": "1"}])
    answer = accept(
        tracking, 3, ["p", {"lr": "2"}], ["new", 1], ["m", "x", 1, {"a": 1}], [], ["a", "k", 1, "0" * 64],
        ["m", 2**70, 1, {"a": 1}], ["s", "flying", 1, None], ["m", 2, 1, {"loss": 2.0}],
    )  # fmt: skip

    assert answer.accepted == 10
    assert [record.number for record in answer.refused] == [3, 4, 5, 6, 7, 8, 9]
    assert steps(tracking) == [2]


def test_a_wrong_record_among_metrics_is_the_only_one_that_is_refused(database: Database) -> None:
    tracking = Tracking(database)
    accept(tracking, 1, RUN)
    wrong: list[list[Any]] = [
        ["m", 0, 1, {"loss": "text"}], ["m", 0, 1, {"loss": 1.0, "../x": 1.0}], ["m", 2**63, 1, {"loss": 1.0}],
        ["m", 0, 1, ["loss"]], ["m", 0, 1, "loss"], ["m", 0, 1], ["m", 0, 1, {"loss": 1.0}, 5],
        ["m", None, 1, {"loss": 0}],
    ]  # fmt: skip
    right: list[list[Any]] = [["m", step, 7, {"loss": step / 2, "acc": "NaN"}] for step in range(1, 4)]
    right.append(["m", "4", 7.0, {"loss": True, "empty": "-Infinity"}])
    for number, record in enumerate(wrong):
        first = 2 + number * (2 * len(right) + 1)
        answer = accept(tracking, first, *right, record, *right)
        assert [refused.number for refused in answer.refused] == [first + len(right)], record
    assert steps(tracking) == [1, 2, 3, 4]
    assert steps(tracking, "acc") == [1, 2, 3]
    rows = database.read_and_wait(lambda s: s.execute("SELECT sum(points) FROM tail").fetchone())
    assert rows[0] == 2 * len(wrong) * 8
    accept(tracking, 2 + len(wrong) * (2 * len(right) + 1), ["m", 5, 7, {}])
    assert steps(tracking) == [1, 2, 3, 4]


def test_a_cut_drops_the_points_behind_a_step(database: Database) -> None:
    tracking = Tracking(database)
    accept(tracking, 1, RUN, *(["m", step, step, {"loss": float(step), "acc": 1.0}] for step in range(10)))
    run = database.read_and_wait(lambda s: s.execute("SELECT pk FROM run").fetchone())[0]
    assert database.sealer.seal(run, merges=False)
    accept(tracking, 12, *(["m", step, step, {"loss": float(step)}] for step in range(10, 15)))
    accept(tracking, 17, ["m", 90, 1, {"new": 1.0}], ["cut", 6], ["m", 7, 99, {"loss": 0.7}])

    assert steps(tracking) == [*range(7), 7]
    assert steps(tracking, "acc") == list(range(7))
    assert steps(tracking, "new") == []
    metrics = asyncio.run(tracking.run(ADA, "r1")).metrics
    assert [(metric.key, metric.step, metric.value) for metric in metrics] == [("acc", 6, 1.0), ("loss", 7, 0.7)]


def test_a_cut_of_one_key_leaves_the_others(database: Database) -> None:
    tracking = Tracking(database)
    accept(tracking, 1, RUN, *(["m", step, step, {"loss": float(step), "acc": 1.0}] for step in range(10)))
    run = database.read_and_wait(lambda s: s.execute("SELECT pk FROM run").fetchone())[0]
    assert database.sealer.seal(run, merges=False)
    accept(tracking, 12, *(["m", step, step, {"loss": float(step), "acc": 2.0}] for step in range(10, 15)))
    answer = accept(tracking, 17, ["cut", 6, "loss"], ["cut", -1, "unknown"], ["cut", 1, ""], ["cut", 1, 7])

    assert [refused.number for refused in answer.refused] == [19, 20]
    assert steps(tracking) == list(range(7))
    assert steps(tracking, "acc") == list(range(15))
    metrics = asyncio.run(tracking.run(ADA, "r1")).metrics
    assert [(metric.key, metric.step, metric.value) for metric in metrics] == [("acc", 14, 2.0), ("loss", 6, 6.0)]


def test_a_silent_run_is_lost_and_running_again_when_it_is_heard(database: Database) -> None:
    clock = Clock()
    database.clock = clock
    own = Tracking(database, clock=clock)
    asyncio.run(own.create_run(ADA, "0", run_id="mlflow"))
    accept(own, 1, RUN)
    heard = asyncio.run(own.run(ADA, "r1")).heartbeat_at
    assert heard is not None

    assert asyncio.run(own.mark_lost(clock.now + 30_000)) == []
    assert asyncio.run(own.mark_lost(heard + clock.now + 61_000)) == ["r1"]
    assert asyncio.run(own.run(ADA, "r1")).state is RunState.LOST
    assert asyncio.run(own.run(ADA, "mlflow")).state is RunState.RUNNING
    assert accept(own, 2).state is RunState.RUNNING
    assert asyncio.run(own.run(ADA, "r1")).state is RunState.RUNNING


def test_a_run_that_ended_keeps_its_end_and_its_error(database: Database) -> None:
    tracking = Tracking(database)
    assert accept(tracking, 1, RUN, ["s", "failed", 77, "boom"]).state is RunState.FAILED

    run = asyncio.run(tracking.run(ADA, "r1"))
    assert (run.ended_at, run.error) == (77, "boom")
    assert accept(tracking, 3, ["h", 80]).state is RunState.FAILED


def test_a_command_is_handed_out_until_it_is_acknowledged(database: Database) -> None:
    tracking = Tracking(database)
    accept(tracking, 1, RUN)
    asyncio.run(tracking.send_command(ADA, "r1", "save"))

    assert [(c.number, c.action) for c in accept(tracking, 2).commands] == [(1, "save")]
    assert accept(tracking, 2, ["ack", 1, "saved"]).commands == []
    (command,) = asyncio.run(tracking.commands(ADA, "r1"))
    assert (command.result, command.acknowledged_at is not None) == ("saved", True)
    with pytest.raises(Refusal, match="use one of save, stop, abort"):
        asyncio.run(tracking.send_command(ADA, "r1", "explode"))
    accept(tracking, 3, ["s", "completed", 1, None])
    with pytest.raises(Refusal, match="the run is over") as refused:
        asyncio.run(tracking.send_command(ADA, "r1", "stop"))
    assert refused.value.reason is Reason.CONFLICT


def test_two_clients_of_one_run_number_their_own_records(database: Database) -> None:
    tracking = Tracking(database)
    accept(tracking, 1, RUN, ["m", 1, 1, {"loss": 1.0}], client="first")
    accept(tracking, 1, RUN, ["m", 2, 2, {"loss": 2.0}], client="second")

    assert steps(tracking) == [1, 2]
