from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import ArgumentNotPicklable, NodeError, PoolClosed, SlotLost, TaskTimeout, UsageError
from skyward.training.evaluation import AdaptiveCompute, Content, Dispatcher, Job, Outcome
from skyward.training.evaluation.dispatchers import InProcessDispatcher, SubprocessDispatcher, as_dispatcher
from skyward.training.evaluation.members import WorkerState
from tests.training.evaluation.dispatchers.jobs import doubled, hang, job_of, kill_me, make, sleep_on, waits_for
from tests.waiting import until, until_text


class _Slow(InProcessDispatcher):
    """Dispatcher that takes a while to hand over jobs, probes included."""

    def __init__(self, name: str, delay_s: float = 0.0) -> None:
        super().__init__(name=name)
        self.delay_s = delay_s
        self.taken = self.asked = 0

    def submit(self, job: Job) -> Future[Outcome]:
        is_probe = job.snapshot_id == "probe"
        self.asked += is_probe
        self.taken += not is_probe
        time.sleep(self.delay_s)
        return super().submit(job)


@contextmanager
def two_processes() -> Iterator[tuple[AdaptiveCompute, list[SubprocessDispatcher]]]:
    dispatchers = [SubprocessDispatcher(name=name) for name in ("left", "right")]
    compute = AdaptiveCompute(dispatchers)
    yield compute, dispatchers
    compute.close(cancel=True)
    for dispatcher in dispatchers:
        dispatcher.close(cancel=True)


@pytest.fixture
def pair() -> Iterator[tuple[AdaptiveCompute, list[SubprocessDispatcher]]]:
    """Make two processes."""
    with two_processes() as made:
        yield made


def _dies_elsewhere() -> list[Any]:
    if threading.current_thread() is threading.main_thread():
        os.kill(os.getpid(), signal.SIGKILL)
    return make()


def _begun(folder: Path, name: object) -> int:
    """Return the process in which it has begun."""
    return int(until_text(folder / f"begun-{name}"))


def test_each_evaluation_goes_where_it_is_expected_to_end_first() -> None:
    quick, slow = _Slow("quick"), _Slow("slow", delay_s=3.0)  # longer than a loaded machine stalls
    with AdaptiveCompute([slow, quick]) as compute:
        for n in range(10):
            assert compute.submit(job_of(n)).result(60).value["value"] == 2 * n + 1
        assert slow.taken == 1  # the first of equals, and not again when the other one is known
        assert quick.taken == 9
        states = {state.name: state for state in compute.workers}
        assert states["slow"].latency_s > 2.9 > states["quick"].latency_s
    assert quick.submit(job_of(1)).result(60).value  # the user's stay open
    for dispatcher in (quick, slow):
        dispatcher.close()


def test_several_evaluations_run_at_once_on_several_workers(
    pair: tuple[AdaptiveCompute, list[SubprocessDispatcher]], tmp_path: Path
) -> None:
    compute, _ = pair
    assert compute.slots == 2
    futures = [compute.submit(job_of(n, waits_for, str(tmp_path))) for n in range(2)]
    assert _begun(tmp_path, 0) != _begun(tmp_path, 1)
    for n in range(2):
        (tmp_path / f"end-{n}").touch()
    assert {future.result(60).worker for future in futures} == {"left", "right"}


def test_the_evaluation_of_a_killed_worker_goes_to_another_at_once(tmp_path: Path) -> None:
    noticed_s: list[float] = []
    while len(noticed_s) < 5:  # other processes may delay some of the looks, but not all
        (folder := tmp_path / str(len(noticed_s))).mkdir()
        with two_processes() as (compute, _):
            noticed_s.append(_seconds_until_a_death_is_noticed(compute, folder))
        if noticed_s[-1] < 0.7:
            break
    assert min(noticed_s) < 0.7  # published: 743 ms
    print(f"noticed after {1000 * min(noticed_s):.0f} ms")


def _seconds_until_a_death_is_noticed(compute: AdaptiveCompute, folder: Path) -> float:
    """Kill the worker that evaluates, and check that the other one does it, and that both are used again."""
    future = compute.submit(job_of(7, waits_for, str(folder)))
    first = _begun(folder, 7)
    (folder / "begun-7").unlink()
    killed: list[WorkerState] = []

    def is_noticed() -> bool:
        killed[:] = [state for state in compute.workers if state.failures]  # whichever was warm first
        return bool(killed)

    killed_at = time.monotonic()
    os.kill(first, signal.SIGKILL)
    until(is_noticed)
    noticed_s = time.monotonic() - killed_at
    assert _begun(folder, 7) != first
    (folder / "end-7").touch()
    outcome = future.result(60)
    assert outcome.value["value"] == 7
    assert {killed[0].name, outcome.worker} == {"left", "right"}
    assert killed[0].failures == 1
    assert killed[0].is_suspended or noticed_s > 0.7, "for a second"
    until(lambda: not any(state.is_suspended for state in compute.workers))  # by itself
    return noticed_s


def test_an_evaluation_that_kills_its_workers_is_reported_and_does_not_go_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The pause of a second would be over before the second worker has died, on a busy machine.
    monkeypatch.setattr("skyward.training.evaluation.worker_score._PAUSE_S", (600.0, 600.0))
    with two_processes() as (compute, _):
        compute.add_worker(None)  # must not run it: it is this process
        compute.remove_worker("in-process")
        with pytest.raises(SlotLost):
            compute.submit(job_of(1, kill_me)).result(60)
        assert [state.failures for state in compute.workers] == [1, 1]
        assert compute.is_backpressured()  # nobody is there now
        assert compute.submit(job_of(2)).result(60).value["value"] == 5  # the one that may be tried first is
        until(lambda: not compute.is_backpressured())


def test_an_error_of_the_evaluation_does_not_count_against_the_worker(
    pair: tuple[AdaptiveCompute, list[SubprocessDispatcher]],
) -> None:
    compute, _ = pair

    def fail(model: Any, payload: Any) -> dict[str, Any]:
        raise KeyError("no such label")

    with pytest.raises(KeyError, match="no such label"):
        compute.submit(job_of(1, fail)).result(60)
    with pytest.raises(ArgumentNotPicklable):
        compute.submit(job_of(1, doubled, threading.Lock())).result(60)
    with pytest.raises(TaskTimeout):
        compute.submit(job_of(1, hang, 1000, timeout_s=0.1)).result(60)
    assert [state.failures for state in compute.workers] == [0, 0]


def test_a_closed_worker_is_skipped() -> None:
    closed, there = InProcessDispatcher(name="closed"), InProcessDispatcher(name="there")
    closed.close()
    with AdaptiveCompute([closed, there]) as compute:
        assert compute.submit(job_of(1)).result(60).worker == "there"
        compute.remove_worker(there)
        with pytest.raises(PoolClosed, match="closed: accepts no evaluations"):
            compute.submit(job_of(1)).result(60)
    there.close()


def test_pressure_comes_and_goes_by_itself(tmp_path: Path) -> None:
    """Defect 4 of the reference: under "skip" it never ended, because nothing was observed again."""
    with AdaptiveCompute([None], initial_latency=10.0, backpressure_threshold=5.0) as compute:
        assert not compute.is_backpressured()
        compute.warmup(rounds=3, set_backpressure=True)
        assert not compute.is_backpressured()
        assert compute.threshold_s == 5.0  # no evaluation was seen: the time of an identity says nothing
        futures = [compute.submit(job_of(n, waits_for, str(tmp_path))) for n in range(2)]
        assert compute.is_backpressured()
        for n in range(2):
            (tmp_path / f"end-{n}").touch()
        for future in futures:
            future.result(60)
        until(lambda: not compute.is_backpressured())
        assert compute.pressure() == 0.0
        latency_s = compute.workers[0].latency_s
        assert 1.5 * latency_s <= compute.threshold_s < 5.0  # 1.5 x the slower of the two


def test_a_warm_up_measures_correctly_and_may_eject() -> None:
    near, far, dead = _Slow("near"), _Slow("far", delay_s=0.5), InProcessDispatcher(name="dead")
    dead.close()
    with AdaptiveCompute([near, far, dead]) as compute:
        answers = compute.warmup(rounds=3, timeout=20.0, eject_on_failure=True)
        assert answers["dead"] is None
        assert answers["near"] is not None
        assert answers["far"] is not None
        fastest = answers["far"]
        for _ in range(5):
            if fastest >= 1.5:  # the machine was busy
                fastest = min(fastest, compute.warmup(rounds=3, timeout=20.0)["far"] or fastest)
        assert 0.5 <= fastest < 1.5  # not 3.69 times that
        assert [state.name for state in compute.workers] == ["near", "far"]
        assert compute.submit(job_of(1)).result(60).worker == "near"
        near.close()
        far.close()
        with pytest.raises(NodeError, match="no worker answered"):
            compute.warmup(rounds=1, timeout=0.1)


def test_a_stopped_idle_worker_is_noticed_and_comes_back() -> None:
    with AdaptiveCompute(["subprocess"]) as compute:
        pid = compute.submit(job_of(1)).result(60).value["pid"]
        compute.add_worker(None)
        compute.start_health_probes(interval=0.05, timeout=1.0, max_strikes=2)
        os.kill(pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        until(lambda: compute.workers[0].is_suspended)
        print(f"noticed after {1000 * (time.monotonic() - stopped_at):.0f} ms")
        assert not compute.workers[1].is_suspended
        os.kill(pid, signal.SIGCONT)
        until(lambda: not compute.workers[0].is_suspended)
        os.kill(pid, signal.SIGKILL)  # a new process takes its place, however long that needs to start
        compute.stop_health_probes()
        compute.warmup(rounds=1, timeout=30)
        assert not compute.workers[0].is_suspended


def test_a_worker_that_is_stopped_for_long_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.training.evaluation.members.GIVE_UP_S", 8.0)  # a new process starts in that time
    with AdaptiveCompute(["subprocess"]) as compute:
        pid = compute.submit(job_of(1)).result(60).value["pid"]
        os.kill(pid, signal.SIGSTOP)
        compute.start_health_probes(interval=0.05, timeout=0.1, max_strikes=1)
        until(lambda: compute.workers[0].is_suspended)
        until(lambda: not compute.workers[0].is_suspended and compute.workers[0].open == 0)
        assert compute.submit(job_of(1)).result(60).value["pid"] != pid


def test_a_worker_that_has_become_slow_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_NOISE_S", "_PROBE_NOISE_S"):  # of a busy machine
        monkeypatch.setattr(f"skyward.training.evaluation.worker_score.{name}", 0.4)
    changing, steady = _Slow("changing"), _Slow("steady", delay_s=0.02)
    with AdaptiveCompute([changing, steady]) as compute:
        compute.start_health_probes(interval=0.01, timeout=20.0)
        for n in range(5):
            compute.submit(job_of(n)).result(60)
        until(lambda: changing.asked >= 10)  # how it was
        changing.delay_s = 1.0
        slow_at = time.monotonic()
        until(lambda: compute.workers[0].is_drifting)
        noticed_s = time.monotonic() - slow_at
        print(f"noticed after {noticed_s:.2f} s")
        assert noticed_s < 30  # after a few probes of a second
        assert not compute.workers[1].is_drifting
        changing.delay_s = 0.0
        until(lambda: not compute.workers[0].is_drifting)
    for dispatcher in (changing, steady):
        dispatcher.close()


def test_a_busy_worker_is_not_probed(tmp_path: Path) -> None:
    with AdaptiveCompute([None]) as compute:
        future = compute.submit(job_of(0, waits_for, str(tmp_path)))
        _begun(tmp_path, 0)
        compute.start_health_probes(interval=0.01, timeout=0.01, max_strikes=1)
        assert not future.cancelled()
        with pytest.raises(TimeoutError):
            future.result(0.3)
        assert compute.workers[0].failures == 0
        (tmp_path / "end-0").touch()
        assert future.result(60).value["value"] == 0


def test_workers_come_and_go() -> None:
    with AdaptiveCompute([_Slow("a", 0.05)]) as compute:
        for n in range(3):
            compute.submit(job_of(n)).result(60)
        with pytest.raises(UsageError, match="worker='a': is the last one"):
            compute.remove_worker("a")
        latency_s = compute.workers[0].latency_s
        assert compute.add_worker(None) == "in-process"
        assert compute.add_worker(None) == "in-process 2"
        assert [state.latency_s for state in compute.workers] == [pytest.approx(latency_s)] * 3
        with pytest.raises(
            UsageError, match="worker='b': no such worker; use one of 'a', 'in-process', 'in-process 2'"
        ):
            compute.remove_worker("b")
        compute.remove_worker("a")
        assert compute.submit(job_of(1)).result(60).worker == "in-process"
        compute.remove_worker("in-process")
        assert compute.submit(job_of(1)).result(60).worker == "in-process 2"
        assert [state.name for state in compute.workers] == ["in-process 2"]


def test_closing_ends_workers_started_here_and_cancels_the_rest(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    compute = AdaptiveCompute([None, "subprocess"])
    compute.start_health_probes(interval=60)
    futures = [compute.submit(job_of(n, waits_for, str(tmp_path))) for n in range(4)]
    compute.close(cancel=True)
    assert all(future.cancelled() for future in futures)
    compute.close()
    for n in range(4):
        (tmp_path / f"end-{n}").touch()
    until(lambda: set(threading.enumerate()) <= threads)
    with pytest.raises(UsageError, match="closed"):
        compute.submit(job_of(1))
    with pytest.raises(UsageError, match="closed"):
        compute.start_health_probes()


def slow_to_make() -> list[Any]:
    time.sleep(3.0)
    return make()


def test_cold_nodes_delay_nothing_and_get_their_share_when_they_are_warm() -> None:
    """The observed failure: 22 of 24 evaluations ran in this process while two started nodes idled."""
    lasting_s, count = 0.3, 24
    contents = {"factory": slow_to_make, "payload": lasting_s}
    state = {"w": [1.0]}
    with (
        sky.ComputePool(provider=sky.Local(), nodes=2, logs=False, console=False) as pool,
        AdaptiveCompute([pool.node(0), pool.node(1), _Warm()]) as compute,
    ):
        futures = [compute.submit(job_of(state, sleep_on, **contents)) for _ in range(3)]
        assert {future.result(60).worker for future in futures} == {"in-process"}, "it is warm"
        until(lambda: not any(state.open for state in compute.workers))
        assert not any(state.failures for state in compute.workers)
        began = time.time()
        futures = [compute.submit(job_of(state, sleep_on, **contents)) for _ in range(count)]
        outcomes = [future.result(60) for future in futures]
        taken = Counter(outcome.worker for outcome in outcomes)
        wall_s = max(outcome.finished_at for outcome in outcomes) - began
        print(f"{dict(taken)} in {wall_s:.2f} s, where {lasting_s * count / 3:.2f} s is ideal")
        assert set(taken) == {"node 0", "node 1", "in-process"}
        assert max(taken.values()) <= count * 2 / 3, taken  # a third each, where the machine slows down no worker
        assert max(outcome.load_s for outcome in outcomes) < 2.9, "no evaluation waited for a model"


class _Warm(InProcessDispatcher):
    """Worker that has its model."""

    def submit(self, job: Job) -> Future[Outcome]:
        return super().submit(dataclasses.replace(job, factory=Content(make, "factory")))


def test_a_factory_that_fails_fails_only_the_evaluation() -> None:
    def fails() -> Any:
        raise OSError("no such base model")

    with AdaptiveCompute(["subprocess"]) as compute:
        with pytest.raises(OSError, match="no such base model"):
            compute.submit(job_of(1, factory=fails)).result(60)
        assert compute.submit(job_of(1)).result(60).value["value"] == 3
        assert compute.workers[0].failures == 0


def test_a_worker_that_dies_during_its_warm_up_is_left_alone() -> None:
    with AdaptiveCompute(["subprocess"]) as compute:
        compute.add_worker(None)
        assert compute.submit(job_of(1, factory=_dies_elsewhere)).result(60).worker == "in-process"
        until(lambda: compute.workers[0].failures == 1)
        assert compute.workers[0].open == 0


def test_a_waiting_evaluation_can_be_cancelled(tmp_path: Path) -> None:
    with AdaptiveCompute([None]) as compute:
        futures = [compute.submit(job_of(n, waits_for, str(tmp_path))) for n in range(3)]
        assert futures[1].cancel()
        for n in (0, 2):
            (tmp_path / f"end-{n}").touch()
        assert [futures[n].result(60).value["value"] for n in (0, 2)] == [0, 2]
        assert not (tmp_path / "begun-1").exists()


def test_nodes_of_a_pool_can_be_workers(tmp_path: Path) -> None:
    with (
        sky.ComputePool(provider=sky.Local(), nodes=2, logs=False, console=False, cancel_grace_s=0.5) as pool,
        AdaptiveCompute([pool.node(0), pool.node(1)]) as compute,
    ):
        given: Dispatcher = compute
        assert as_dispatcher(given) is given
        assert not compute.shares_memory
        compute.warmup(rounds=1, timeout=30)
        future = compute.submit(job_of(7, waits_for, str(tmp_path)))
        first = _begun(tmp_path, 7)
        (tmp_path / "begun-7").unlink()
        killed_at = time.monotonic()
        os.kill(first, signal.SIGKILL)
        until(lambda: any(state.failures for state in compute.workers))
        print(f"noticed after {1000 * (time.monotonic() - killed_at):.0f} ms")
        assert _begun(tmp_path, 7) != first
        (tmp_path / "end-7").touch()
        outcome = future.result(60)
        assert outcome.worker in ("node 0", "node 1")
        assert sum(state.failures for state in compute.workers) == 1
        compute.remove_worker(pool.node(0))
        assert compute.submit(job_of(1)).result(60).worker == "node 1"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", True),
        ("softmax_temperature", -1),
        ("initial_latency", 0),
        ("backpressure_threshold", float("nan")),
    ],
)
def test_bad_numbers_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{field}="):
        AdaptiveCompute([None], **{field: value})


@pytest.mark.parametrize("workers", [[], None, "subprocess", 3])
def test_no_workers_are_refused(workers: Any) -> None:
    with pytest.raises(UsageError, match="^workers="):
        AdaptiveCompute(workers)


def test_an_illegal_worker_is_named_by_its_place() -> None:
    with pytest.raises(UsageError, match=r"^workers\[1\]='zakuro://host:3960': is an address"):
        AdaptiveCompute([None, "zakuro://host:3960"])
    with AdaptiveCompute([None]) as compute:
        with pytest.raises(UsageError, match="^worker=3: unknown place for evaluations; use None"):
            compute.add_worker(3)
        for name in ("interval", "timeout", "max_strikes"):
            with pytest.raises(UsageError, match=f"^{name}=0"):
                compute.start_health_probes(**{name: 0})
        for name in ("rounds", "timeout"):
            with pytest.raises(UsageError, match=f"^{name}=0"):
                compute.warmup(**{name: 0})  # type: ignore[arg-type]
