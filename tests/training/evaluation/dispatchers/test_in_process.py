from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import TaskExited, TaskTimeout, UsageError
from skyward.training.evaluation.dispatchers import InProcessDispatcher, as_dispatcher
from tests.training.evaluation.dispatchers.jobs import doubled, job_of, waits_for
from tests.waiting import until


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    until(lambda: set(threading.enumerate()) <= before)


def _gate() -> tuple[threading.Event, threading.Event, Callable[[Any, Any], dict[str, Any]]]:
    begun, end = threading.Event(), threading.Event()

    def evaluate(model: Any, payload: Any) -> dict[str, Any]:
        begun.set()
        assert end.wait(60)
        return {"value": model[0]}

    return begun, end, evaluate


@pytest.mark.usefixtures("no_thread_stays")
def test_the_values_themselves_are_used_and_nothing_is_pickled() -> None:
    lock = threading.Lock()  # cannot be pickled

    def evaluate(model: Any, payload: Any) -> dict[str, Any]:
        return {"same": model[0] is state and payload is lock}

    state = object()
    dispatcher = InProcessDispatcher()
    outcome = dispatcher.submit(job_of(state, evaluate, lock)).result(60)
    assert outcome.value == {"same": True}
    assert outcome.worker == "in-process"
    assert outcome.started_at + outcome.load_s <= outcome.finished_at
    dispatcher.close()


@pytest.mark.usefixtures("no_thread_stays")
def test_a_model_is_made_once_for_a_key_and_each_time_without_one() -> None:
    dispatcher = InProcessDispatcher()
    made = []

    def make() -> list[Any]:
        made.append(1)
        return [None]

    for state in range(3):
        value = dispatcher.submit(job_of(state, factory=make)).result(60).value["value"]
        assert value == 2 * state + 1
    assert len(made) == 1
    for state in range(2):
        dispatcher.submit(job_of(state, factory=make, cache_key=None)).result(60)
    assert len(made) == 3
    dispatcher.close()


@pytest.mark.usefixtures("no_thread_stays")
def test_each_slot_runs_one_evaluation_with_its_own_model(tmp_path: Path) -> None:
    dispatcher = InProcessDispatcher(slots=2)
    futures = [dispatcher.submit(job_of(n, waits_for, str(tmp_path))) for n in range(3)]
    until(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
    assert dispatcher.pressure() > 0
    (tmp_path / "end-0").touch()
    until((tmp_path / "begun-2").exists)
    (tmp_path / "end-2").touch()
    (tmp_path / "end-1").touch()
    assert [future.result(60).value["value"] for future in futures] == [0, 1, 2]
    assert dispatcher.pressure() == 0
    dispatcher.close()


@pytest.mark.usefixtures("no_thread_stays")
def test_an_error_of_the_evaluation_is_raised_and_the_next_one_runs() -> None:
    dispatcher = InProcessDispatcher()

    def fail(model: Any, payload: Any) -> dict[str, Any]:
        raise KeyError("no such label")

    with pytest.raises(KeyError, match="no such label"):
        dispatcher.submit(job_of(1, fail)).result(60)
    with pytest.raises(TaskExited, match="sys.exit"):
        dispatcher.submit(job_of(1, lambda model, payload: sys.exit(3))).result(60)
    assert dispatcher.submit(job_of(1, doubled)).result(60).value["value"] == 3
    dispatcher.close()


@pytest.mark.usefixtures("no_thread_stays")
def test_an_evaluation_that_times_out_is_abandoned_and_the_next_one_has_a_new_model() -> None:
    dispatcher = InProcessDispatcher()
    begun, end, evaluate = _gate()
    slow = dispatcher.submit(job_of(1, evaluate, timeout_s=0.5))
    following = dispatcher.submit(job_of(2))
    with pytest.raises(TaskTimeout, match="step 1 ran longer than its timeout_s of 0.5 s"):
        slow.result(60)
    assert begun.wait(60)
    assert following.result(60).value["value"] == 5
    dispatcher.close()  # does not wait for the abandoned one
    end.set()


@pytest.mark.usefixtures("no_thread_stays")
def test_the_time_of_a_waiting_evaluation_does_not_run() -> None:
    dispatcher = InProcessDispatcher()
    _begun, end, evaluate = _gate()
    first = dispatcher.submit(job_of(1, evaluate))
    second = dispatcher.submit(job_of(2, timeout_s=3.0))
    with pytest.raises(TimeoutError):
        second.result(3.2)
    assert not second.done()
    end.set()
    assert first.result(60).value == {"value": 1}
    assert second.result(60).value["value"] == 5
    dispatcher.close()


@pytest.mark.usefixtures("no_thread_stays")
def test_cancelling_ends_the_wait_whether_it_runs_or_not() -> None:
    dispatcher = InProcessDispatcher()
    begun, end, evaluate = _gate()
    running = dispatcher.submit(job_of(1, evaluate))
    assert begun.wait(60)
    queued = dispatcher.submit(job_of(2))
    assert queued.cancel()
    assert running.cancel()
    assert running.cancelled()
    assert queued.cancelled()
    assert dispatcher.submit(job_of(3)).result(60).value["value"] == 7
    end.set()
    dispatcher.close()


@pytest.mark.usefixtures("no_thread_stays")
def test_close_waits_or_cancels_and_then_refuses() -> None:
    dispatcher = InProcessDispatcher()
    future = dispatcher.submit(job_of(1))
    dispatcher.close()
    assert future.done()
    assert future.result().value["value"] == 3
    dispatcher.close()
    with pytest.raises(UsageError, match="closed"):
        dispatcher.submit(job_of(1))

    dispatcher = InProcessDispatcher()
    begun, end, evaluate = _gate()
    futures = [dispatcher.submit(job_of(n, evaluate)) for n in range(2)]
    assert begun.wait(60)
    dispatcher.close(cancel=True)
    assert all(future.cancelled() for future in futures)
    end.set()


@pytest.mark.parametrize("slots", [0, True, 1.5, "2"])
def test_a_bad_number_of_slots_is_refused(slots: Any) -> None:
    with pytest.raises(UsageError, match="slots"):
        InProcessDispatcher(slots=slots)


def test_none_means_threads_of_this_process() -> None:
    dispatcher = as_dispatcher(None)
    assert isinstance(dispatcher, InProcessDispatcher)
    assert dispatcher.shares_memory
    assert as_dispatcher(dispatcher) is dispatcher


class _HasAddress:
    uri = "zakuro://host:3960"


@pytest.mark.parametrize("compute", ["zakuro://host:3960", _HasAddress()])
def test_an_address_is_refused_with_advice(compute: Any) -> None:
    with pytest.raises(UsageError, match=r"compute=.*: is an address.*pool\.node\(1\)"):
        as_dispatcher(compute)


@pytest.mark.parametrize("compute", ["subproces", 3, object(), InProcessDispatcher, [None]])
def test_an_unknown_place_is_refused(compute: Any) -> None:
    with pytest.raises(UsageError, match=r"^val_compute=.*: unknown place for evaluations; use None"):
        as_dispatcher(compute, field="val_compute")
