"""Conformance suite of pools whose slots are processes, beyond `EngineSuite`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..calls.compute import compute
from ..errors import NodeLost, SlotLost, TaskTimeout
from ..node.slot.runtime import instance_info
from ..pool.pool import ComputePool
from .engine_suite import EngineSuite, appear, wait_for
from .faults import Faults


class ProcessEngineSuite(EngineSuite):
    """Conformance of a pool whose slots are processes: a slot can be interrupted, killed and replaced.

    It includes `EngineSuite` and is used in the same way. It injects faults from this machine, so the nodes must be
    child processes of this one.

    Example:
        class TestMine(ProcessEngineSuite):
            @pytest.fixture(scope="module")
            def pool(self):
                with sky.ComputePool(Mine(), nodes=2, concurrency=2) as pool:
                    yield pool
    """

    @pytest.fixture
    def faults(self, pool: ComputePool) -> Iterator[Faults]:
        """Return a tool that kills slots and nodes. Before and after the test, wait until the pool is complete."""
        faults = Faults(pool)
        faults.wait_until_whole()
        yield faults
        faults.wait_until_whole()

    def test_user_code_runs_in_the_main_thread(self, pool: ComputePool) -> None:
        def is_main() -> bool:
            return threading.current_thread() is threading.main_thread()

        assert compute(is_main)() @ pool == [True] * pool.nodes

    def test_a_running_call_that_is_cancelled_is_interrupted(self, pool: ComputePool, shared: Path) -> None:
        def wait() -> None:
            try:
                appear(shared / "began")  # within, because the interruption may come at once
                time.sleep(600)
            except KeyboardInterrupt:
                appear(shared / "interrupted")
                raise

        future = compute(wait)() > pool
        wait_for(shared / "began")
        assert future.cancel()
        wait_for(shared / "interrupted")
        assert compute(abs)(-1) @ pool == [1] * pool.nodes

    def test_a_call_that_cannot_be_interrupted_is_killed(self, pool: ComputePool, shared: Path) -> None:
        def deaf() -> None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            appear(shared / str(os.getpid()))
            while True:
                time.sleep(60)

        future = compute(deaf)() > pool
        while not list(shared.iterdir()):
            time.sleep(0.005)
        (pid_file,) = shared.iterdir()
        assert future.cancel()
        deadline = time.monotonic() + pool.spec.cancel_grace_s + 10
        while _is_alive(int(pid_file.name)):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_a_call_that_takes_too_long_is_stopped(self, pool: ComputePool) -> None:
        with pytest.raises(TaskTimeout):
            compute(timeout_s=0.2)(time.sleep)(600) >> pool

    def test_the_death_of_a_slot_fails_its_call_alone(self, pool: ComputePool, faults: Faults) -> None:
        dying = compute(lambda: os._exit(3))() > pool
        living = [compute(abs)(-i) > pool for i in range(50)]
        assert [f.result(60) for f in living] == list(range(50))
        error = dying.exception(60)
        assert isinstance(error, SlotLost)
        assert (error.exit_code, error.started) == (3, True)

    def test_a_call_with_retries_survives_the_death_of_its_slot(
        self, pool: ComputePool, faults: Faults, shared: Path
    ) -> None:
        def die_once() -> str:
            if not (shared / "died").exists():
                appear(shared / "died")
                os.kill(os.getpid(), signal.SIGKILL)
            return "done"

        assert compute(retries=1)(die_once)() >> pool == "done"

    def test_the_death_of_a_node_is_told_and_the_node_replaced(
        self, pool: ComputePool, faults: Faults, shared: Path
    ) -> None:
        def wait_on_last(last: int) -> int:
            info = instance_info()
            assert info is not None
            if info.node == last:
                appear(shared / "began")
                time.sleep(600)
            return info.node

        last = pool.nodes - 1
        with _broadcast_meanwhile(pool, wait_on_last, last) as outcome:
            wait_for(shared / "began")
            faults.kill_node(last)
        assert isinstance(outcome[0], NodeLost)
        assert outcome[0].node == last
        faults.wait_until_whole()
        assert compute(abs)(-1) @ pool == [1] * pool.nodes

    def test_a_call_with_retries_survives_the_death_of_its_node(
        self, pool: ComputePool, faults: Faults, shared: Path
    ) -> None:
        def second_time() -> int:
            info = instance_info()
            assert info is not None
            if not (shared / "began").exists():
                (shared / "node").write_text(str(info.node))
                appear(shared / "began")
                time.sleep(600)
            return info.node

        future = compute(retries=1)(second_time)() > pool
        wait_for(shared / "began")
        faults.kill_node(int((shared / "node").read_text()))
        assert future.result(60) in range(pool.nodes)


@contextlib.contextmanager
def _broadcast_meanwhile(pool: ComputePool, function: object, *args: object) -> Iterator[list[BaseException]]:
    """Broadcast in a thread while the block runs, and yield a list that receives its error."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            compute(function)(*args) @ pool  # type: ignore[call-overload]
        except BaseException as error:  # the test inspects it
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield raised
    thread.join(60)
    assert not thread.is_alive()


def _is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
