from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.errors import ArgumentNotPicklable, PoolClosed, SlotLost, TaskTimeout, UsageError
from skyward.training.evaluation.dispatchers import PoolDispatcher, as_dispatcher
from tests.training.evaluation.dispatchers.jobs import NoteLoading, doubled, hang, job_of, kill_me, waits_for
from tests.waiting import lines_of, until, until_text


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), nodes=2, logs=False, console=False, cancel_grace_s=0.5) as pool:
        yield pool


class _Counting:
    """A target that counts the bytes of contents in each call."""

    def __init__(self, pool: sky.ComputePool) -> None:
        self.pool, self.total_slots = pool, 2
        self.carried: list[int] = []

    def run(self, pending: Any) -> Any:
        return self.pool.run(pending)

    def submit(self, pending: Any) -> Future[Any]:
        self.carried.append(sum(len(data) for data in pending.args[1].values()))
        return self.pool.submit(pending)


def test_evaluations_run_side_by_side_on_the_nodes_and_name_them(pool: sky.ComputePool, tmp_path: Path) -> None:
    dispatcher = as_dispatcher(pool)
    assert isinstance(dispatcher, PoolDispatcher)
    assert dispatcher.slots == 2
    futures = [dispatcher.submit(job_of(n, waits_for, str(tmp_path))) for n in range(3)]
    until(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
    assert dispatcher.pressure() > 0
    for n in range(3):
        (tmp_path / f"end-{n}").touch()
    outcomes = [future.result(60) for future in futures]
    assert [outcome.value["value"] for outcome in outcomes] == [0, 1, 2]
    assert {outcome.worker for outcome in outcomes} == {"node 0", "node 1"}
    assert {outcome.value["pid"] for outcome in outcomes}.isdisjoint({os.getpid()})
    for outcome in outcomes:
        assert outcome.started_at + outcome.load_s <= outcome.finished_at
    assert dispatcher.pressure() == 0
    dispatcher.close()
    with pytest.raises(UsageError, match="closed"):
        dispatcher.submit(job_of(1))


def test_only_nodes_reserved_for_evaluations_run_them(pool: sky.ComputePool) -> None:
    dispatcher = as_dispatcher(pool.node(1))
    assert (dispatcher.name, dispatcher.slots) == ("node 1", 1)
    outcomes = [dispatcher.submit(job_of(n)).result(60) for n in range(3)]
    assert {outcome.worker for outcome in outcomes} == {"node 1"}
    assert len({outcome.value["built"] for outcome in outcomes}) == 1  # the model stays there
    dispatcher.close()


def test_the_package_stands_for_the_open_pool(pool: sky.ComputePool) -> None:
    dispatcher = as_dispatcher(sky)
    assert dispatcher.submit(job_of(1)).result(60).value["value"] == 3
    dispatcher.close()


def test_contents_are_sent_and_loaded_once_in_each_slot(pool: sky.ComputePool, tmp_path: Path) -> None:
    """Contents are large enough for a blob, or not."""
    target = _Counting(pool)
    dispatcher = as_dispatcher(target)

    def score(model: Any, payload: Any) -> dict[str, Any]:
        return {**waits_for(model, payload.data.decode().strip()), "built": True}

    folder = str(tmp_path).ljust(1000)
    job = {"payload": NoteLoading(tmp_path / "loaded", folder.encode())}
    first = job_of("a0", score, **job)
    for number in range(3):
        names = [f"{letter}{number}" for letter in "ab"]
        jobs = [_with_state(first, name) for name in names]
        futures = [dispatcher.submit(each) for each in jobs]
        until(lambda: all((tmp_path / f"begun-{name}").exists() for name in names))  # noqa: B023  # used here only
        for name in names:
            (tmp_path / f"end-{name}").touch()
        for future in futures:
            future.result(60)
    assert sorted(lines_of(tmp_path / "loaded")) == sorted(set(lines_of(tmp_path / "loaded")))
    assert len(lines_of(tmp_path / "loaded")) == 2
    assert target.carried[-4:] == [0, 0, 0, 0]
    dispatcher.close()


def _with_state(job: Any, state: Any) -> Any:
    import dataclasses

    return dataclasses.replace(job, state=state)


def test_a_large_state_and_payload_arrive_complete(pool: sky.ComputePool) -> None:
    dispatcher = as_dispatcher(pool)
    payload = np.arange(300_000, dtype=np.float64)

    def score(model: Any, payload: Any) -> dict[str, Any]:
        return {"value": float(model[0]["w"].sum() + payload.sum() + model[0]["b"])}

    first = job_of(None, score, payload)
    for n in range(3):
        state = {"w": np.full(200_000, n, np.float64), "b": n}
        value = dispatcher.submit(_with_state(first, state)).result(60).value
        assert value == {"value": 200_000.0 * n + float(payload.sum()) + n}
    dispatcher.close()


def test_contents_that_a_slot_has_dropped_are_sent_again(pool: sky.ComputePool, tmp_path: Path) -> None:
    dispatcher = as_dispatcher(pool)
    job = job_of(1, doubled, 5)
    assert dispatcher.submit(job).result(60).value["value"] == 7
    for n in range(40):
        dispatcher.submit(job_of(1, doubled, n)).result(60)
    assert dispatcher.submit(job).result(60).value["value"] == 7
    dispatcher.close()


def test_a_slot_that_dies_in_the_middle_is_reported_and_the_next_one_runs(
    pool: sky.ComputePool, tmp_path: Path
) -> None:
    dispatcher = as_dispatcher(pool)
    with pytest.raises(SlotLost):
        dispatcher.submit(job_of(1, kill_me)).result(60)
    future = dispatcher.submit(job_of(0, waits_for, str(tmp_path)))
    begun = tmp_path / "begun-0"
    os.kill(int(until_text(begun)), signal.SIGKILL)
    with pytest.raises(SlotLost):
        future.result(60)
    outcomes = [dispatcher.submit(job_of(n)) for n in range(4)]
    assert [future.result(60).value["value"] for future in outcomes] == [1, 3, 5, 7]
    dispatcher.close()


def test_an_evaluation_that_never_returns_ends_at_its_timeout(pool: sky.ComputePool) -> None:
    dispatcher = PoolDispatcher(pool, start_s=0)
    slow = dispatcher.submit(job_of(1, hang, 1000, timeout_s=0.2))
    with pytest.raises(TaskTimeout):
        slow.result(60)
    assert dispatcher.submit(job_of(2)).result(60).value["value"] == 5
    dispatcher.close()


def test_the_first_one_in_a_slot_has_time_to_import(pool: sky.ComputePool) -> None:
    dispatcher = PoolDispatcher(pool, start_s=30)
    job = job_of(1, hang, 0.5, timeout_s=0.1)
    assert dispatcher.submit(job).result(60).value["value"] == 1
    dispatcher.close()


def test_cancelling_stops_it_on_the_node(pool: sky.ComputePool, tmp_path: Path) -> None:
    dispatcher = as_dispatcher(pool)
    futures = [dispatcher.submit(job_of(n, waits_for, str(tmp_path))) for n in range(3)]
    until(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
    for future in reversed(futures):
        assert future.cancel()
    assert dispatcher.pressure() == 0
    assert dispatcher.submit(job_of(2)).result(60).value["value"] == 5  # slots are free again
    dispatcher.close()
    assert not (tmp_path / "begun-2").exists()


def test_errors_are_raised_unchanged(pool: sky.ComputePool) -> None:
    dispatcher = as_dispatcher(pool)

    def fail(model: Any, payload: Any) -> dict[str, Any]:
        raise KeyError("no such label")

    with pytest.raises(KeyError, match="no such label"):
        dispatcher.submit(job_of(1, fail)).result(60)
    with pytest.raises(ArgumentNotPicklable, match="payload"):
        dispatcher.submit(job_of(1, doubled, threading.Lock())).result(60)
    dispatcher.close()


def test_a_closed_pool_fails_only_evaluations(tmp_path: Path) -> None:
    pool = sky.ComputePool(provider=sky.Local(), nodes=1, logs=False, console=False, cancel_grace_s=0.2).start()
    dispatcher = as_dispatcher(pool)
    future = dispatcher.submit(job_of(0, waits_for, str(tmp_path)))
    until((tmp_path / "begun-0").exists)
    pool.close(cancel=True)
    with pytest.raises(PoolClosed):
        future.result(60)
    with pytest.raises(PoolClosed):
        dispatcher.submit(job_of(1)).result(60)
    dispatcher.close()


def test_an_illegal_start_method_is_refused() -> None:
    for start_s in (-1, True, "3", float("inf")):
        with pytest.raises(UsageError, match="start_s"):
            PoolDispatcher(_Counting(None), start_s=start_s)  # type: ignore[arg-type]
