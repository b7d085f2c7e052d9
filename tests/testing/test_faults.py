"""Fault injection finds the pool's own processes and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import skyward as sky
from skyward.errors import NodeLost, PoolClosed, SlotLost, UsageError
from skyward.testing import Faults


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=2, concurrency=2, logs=False)


@pytest.fixture
def faults(pool: sky.ComputePool) -> Iterator[Faults]:
    faults = Faults(pool)
    faults.wait_until_whole()
    yield faults
    faults.wait_until_whole()


def test_slots_are_the_processes_that_run_calls(pool: sky.ComputePool, faults: Faults) -> None:
    @sky.compute
    def start_a_child() -> int:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
        return os.getpid()

    pids = start_a_child() @ pool
    assert [pid in faults.slots(node) for node, pid in enumerate(pids)] == [True, True]
    assert [len(faults.slots(node)) for node in range(2)] == [2, 2]


def test_a_chosen_slot_is_killed_with_a_chosen_signal(pool: sky.ComputePool, faults: Faults, tmp_path: object) -> None:
    @sky.compute
    def wait_for_the_end(path: str) -> None:
        import time

        with open(path, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)

    path = f"{tmp_path}/pid"
    future = wait_for_the_end(path) > pool
    while not os.path.exists(path) or not os.path.getsize(path):
        pass
    with open(path) as file:
        pid = int(file.read())
    node = next(n for n in range(2) if pid in faults.slots(n))
    assert faults.kill_slot(node, pid=pid, number=signal.SIGSEGV) == pid
    error = future.exception(60)
    assert isinstance(error, SlotLost)
    assert error.signal == signal.SIGSEGV


def test_a_node_is_killed_and_replaced(pool: sky.ComputePool, faults: Faults) -> None:
    agent = faults.agent(1)
    assert faults.kill_node(1) == agent
    faults.wait_until_whole()
    assert faults.agent(1) != agent
    assert sky.compute(abs)(-1) @ pool == [1, 1]


def test_processes_of_other_programs_are_refused(faults: Faults) -> None:
    with pytest.raises(UsageError, match=f"pid={os.getpid()}: not a slot of node 0; use one of"):
        faults.kill_slot(0, pid=os.getpid())
    with pytest.raises(UsageError, match="node=7: not up; use one of the nodes that are: 0, 1"):
        faults.kill_node(7)


def test_a_closed_pool_has_no_processes() -> None:
    with pytest.raises(PoolClosed):
        Faults(sky.ComputePool(sky.Local())).slots()


def test_waiting_for_a_broken_pool_ends(pool: sky.ComputePool, faults: Faults) -> None:
    faults.kill_node(0)
    with pytest.raises(TimeoutError, match="is still incomplete after 0 s"):
        faults.wait_until_whole(timeout_s=0)


def test_a_call_sent_to_a_killed_node_fails(pool: sky.ComputePool, faults: Faults, tmp_path: object) -> None:
    @sky.compute
    def wait(path: str) -> None:
        import time

        info = sky.instance_info()
        assert info is not None
        open(f"{path}/{info.node}", "w").close()
        time.sleep(600)

    futures = [wait(str(tmp_path)) > pool for _ in range(4)]
    while len(os.listdir(str(tmp_path))) < 2:
        pass
    faults.kill_node(0)
    lost = [f.exception(60) for f in futures if not f.cancel()]
    assert all(isinstance(error, NodeLost) and error.node == 0 for error in lost)
