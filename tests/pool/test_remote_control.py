"""A training in a call is reached through the pool's own channel."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import ControlFailed, UsageError
from tests.engines import engine_of
from tests.waiting import lines_of, until


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=2, concurrency=2, logs=False, cancel_grace_s=0.3)


@sky.compute
def train(steps: int = 100_000, **options: Any) -> list[tuple[int, str]]:
    from skyward.training.control import TrainerControlCallback
    from tests.training.control.run import Run

    run = Run([TrainerControlCallback(**options)], pause=lambda: time.sleep(0.002), max_steps=steps)
    run.train()
    return run.events


@sky.compute
def idle(seconds: float) -> None:
    time.sleep(seconds)


@sky.compute
def hold(go: Path) -> None:
    until(go.exists)


def listening(pid: int) -> set[str]:
    """Return the network sockets on which a process listens."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in lines_of(Path(f"/proc/{pid}/net/{name}"))]
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(fd))
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in links}


@pytest.fixture(autouse=True)
def _stopped(pool: sky.ComputePool) -> Iterator[None]:
    """Stop all runs, so that a failing test leaves none to the others."""
    yield
    engine = engine_of(pool)
    engine.cancel_all()
    engine.wait_stopped()


def test_a_call_is_watched_saved_and_stopped_without_an_open_port(pool: sky.ComputePool) -> None:
    future = train() > pool
    control = pool.control(future)
    status = control.status()
    assert status.status == "running"
    assert (status.ranks[0]["pid"], status.world_size) != (os.getpid(), 1)
    assert not listening(status.ranks[0]["pid"])
    until(lambda: control.status().global_step > status.global_step)
    save = control.save(wait_s=60)
    assert save.state == "executed"
    records, following = control.history()
    assert len(records) == following
    stop = control.stop(wait_s=60)
    assert stop.state == "executed"
    assert future.result() == [(save.step, "save"), (stop.step, "save"), (stop.step, "ended")]
    with pytest.raises(ControlFailed, match="the call has ended") as caught:
        control.status()
    assert caught.value.is_gone


def test_a_call_is_found_by_its_name_and_without_one(pool: sky.ComputePool) -> None:
    call = train()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        running = threads.submit(lambda: call >> pool)
        for task in (call, "train", None):
            assert pool.control(task).status().status == "running"
        assert pool.control(call).abort(wait_s=60).state == "executed"
        assert running.result()[-1][1] == "aborted"


def test_a_run_that_has_not_begun_is_awaited(pool: sky.ComputePool, tmp_path: Path) -> None:
    futures = [hold(tmp_path / "go") > pool for _ in range(pool.total_slots)]
    future = train() > pool
    with pytest.raises(ControlFailed, match="waits for a place|does not answer"):
        pool.control(future, start_s=0).status()
    threading.Timer(0.3, (tmp_path / "go").touch).start()
    assert pool.control(future).abort(wait_s=60).state == "executed"
    assert future.result()[-1][1] == "aborted"
    for other in futures:
        other.result()


def test_several_runs_of_one_call_are_told_apart(pool: sky.ComputePool) -> None:
    @sky.compute
    def two() -> list[list[tuple[int, str]]]:
        results: list[list[tuple[int, str]]] = []

        def one(job_id: str) -> None:
            results.append(train.local(job_id=job_id))

        # Threads beside the call's own thread belong to the call, too.
        threads = [threading.Thread(target=one, args=(f"job{n}",)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    future = two() > pool
    control = pool.control(future, job_id="job1")
    until(lambda: _runs_there(control) == 2)
    with pytest.raises(ControlFailed, match="2 runs are open there: job0, job1; choose one with job_id="):
        pool.control(future).status()
    assert control.abort(wait_s=60).state == "executed"
    assert pool.control(future, job_id="job0").stop(wait_s=60).state == "executed"
    assert sorted(events[-1][1] for events in future.result()) == ["aborted", "ended"]


def _runs_there(control: Any) -> int:
    try:
        # No command lists the runs of a call.
        return len(control._transport.ask("GET", "/jobs", None, timeout_s=5)[1]["jobs"])
    except ControlFailed:
        return 0


def test_objects_that_are_no_call_or_have_no_run_are_refused(pool: sky.ComputePool) -> None:
    with pytest.raises(UsageError, match="is not one call"):
        pool.control(concurrent.futures.Future())
    group = (idle(0) & idle(0)) > pool
    with pytest.raises(UsageError, match="is not one call"):
        pool.control(group)
    group.result()
    with pytest.raises(UsageError, match="job_id"):
        pool.control("train", job_id="../x")
    with pytest.raises(ControlFailed, match="no call of 'train' is open in the pool"):
        pool.control("train", start_s=0).status()
    futures = [idle(60) > pool for _ in range(2)]
    with pytest.raises(UsageError, match="2 calls are open"):
        pool.control("idle").status()
    with pytest.raises(ControlFailed, match="does not answer"):
        pool.control(futures[0], start_s=0).status()
    for future in futures:
        future.cancel()


def test_a_call_that_dies_during_a_query_is_reported_as_gone(pool: sky.ComputePool) -> None:
    future = train() > pool
    control = pool.control(future)
    pid = control.status().ranks[0]["pid"]
    threading.Timer(0.2, lambda: os.kill(pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with contextlib.suppress(ControlFailed):
        while True:
            control.status()
    with pytest.raises(ControlFailed) as caught:
        control.status()
    assert caught.value.is_gone
    assert time.monotonic() - began < 60
    with pytest.raises(sky.errors.SlotLost):
        future.result()
    assert sky.compute(abs)(-1) >> pool == 1


def test_a_call_whose_process_is_stopped_answers_late_and_affects_nobody(pool: sky.ComputePool) -> None:
    future = train() > pool
    control = pool.control(future)
    pid = control.status().ranks[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    until(lambda: "T (stopped)" in Path(f"/proc/{pid}/status").read_text())
    answers: list[object] = []

    def ask() -> None:
        try:
            # Commands wait longer than a test may.
            control._transport.ask("GET", "/jobs", None, timeout_s=3)
        except ControlFailed as error:
            answers.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(80)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == {
        "control: the call did not answer within 3 s; try again",
        "control: too many questions to the call are open; try again when some are answered",
    }
    assert sky.compute(abs)(-1) >> pool == 1
    os.kill(pid, signal.SIGCONT)
    until(lambda: not isinstance(_status(control), str))
    assert control.stop(wait_s=60).state == "executed"
    assert future.result()[-1][1] == "ended"


def _status(control: Any) -> Any:
    try:
        return control.status()
    except ControlFailed as error:
        return str(error)


def test_each_thread_answers_for_itself(sky_pools: Callable[..., sky.ComputePool]) -> None:
    pool = sky_pools(nodes=1, concurrency=2, executor="thread", logs=False)
    futures = [train(job_id=f"job{n}") > pool for n in range(2)]
    controls = [pool.control(future) for future in futures]
    assert [control.job_id for control in controls] == ["job0", "job1"]
    for control in controls:
        assert control.stop(wait_s=60).state == "executed"
    assert [future.result()[-1][1] for future in futures] == ["ended", "ended"]


def test_http_is_opened_in_a_call_on_request(pool: sky.ComputePool) -> None:
    from skyward.training.control import find, runs

    future = train(job_id="asked-for", enable_http=True, port=0) > pool
    until(lambda: "asked-for" in [each.job_id for each in runs()])
    assert len(listening(pool.control(future).status().ranks[0]["pid"])) == 1
    assert find("asked-for").status().job_id == pool.control(future).status().job_id
    assert find("asked-for").stop(wait_s=60).state == "executed"
    future.result()
