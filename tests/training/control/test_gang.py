"""Ranks of a gang agree on a command, and on a run that cannot begin."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import skyward as sky
from skyward.errors import UsageError
from tests.engines import engine_of
from tests.few_modules import lean_frameworks
from tests.waiting import until

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with lean_frameworks(), sky.ComputePool(sky.Local(), nodes=2, logs=False, cancel_grace_s=0.3) as opened:
        yield opened


@contextlib.contextmanager
def _ended(pool: sky.ComputePool) -> Iterator[None]:
    """Abort the run of a failed test, so that nobody waits for it."""
    try:
        yield
    finally:
        engine_of(pool).cancel_all()


@sky.compute
@sky.integrations.torch(backend="gloo")
def train(port: int | None = None) -> tuple[str | None, list[tuple[int, str]]]:
    import time

    from skyward.training import TrainerControlCallback, ranks_of_this_process
    from tests.training.control.run import Run

    control = TrainerControlCallback(port=port, enable_http=port is not None)
    run = Run([control], pause=lambda: time.sleep(0.002), ranks=ranks_of_this_process(), save_every=50)
    run.train()
    return control.job_id, run.events


def test_an_abort_reaches_all_ranks_at_one_step_and_status_shows_them_all(pool: sky.ComputePool) -> None:
    with ThreadPoolExecutor() as threads, _ended(pool):
        training = threads.submit(lambda: train() @ pool)
        control = pool.control("train")
        until(lambda: len(control.status().ranks) == 2, 120)
        status = control.status()
        assert status.world_size == 2
        assert [rank["rank"] for rank in status.ranks] == [0, 1]
        assert len({rank["pid"] for rank in status.ranks}) == 2
        save = control.save(wait_s=20)
        abort = control.abort(wait_s=20)
        assert (save.state, abort.state) == ("executed", "executed")
        (first_id, first), (second_id, second) = training.result(60)
    assert first_id == second_id == control.job_id
    assert first == second
    assert first[-1] == (abort.step, "aborted")
    assert (save.step, "save") in first
    assert (abort.step, "save") not in first


def test_a_taken_port_is_an_error_of_all_ranks(pool: sky.ComputePool) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="cannot listen on 127.0.0.1") as caught:
            train(taken.getsockname()[1]) @ pool
    assert "Rank 1 then failed: RankFailed" in "\n".join(caught.value.__notes__)
