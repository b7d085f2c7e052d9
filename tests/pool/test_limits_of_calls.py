"""Limits of calls that the kernel enforces: the processors and the memory that they book, by control groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.core.cgroups import groups_of
from skyward.events import NodeReady
from skyward.node.agent.limit_groups import find_enforcement
from skyward.testing import Faults
from tests.waiting import until

pytestmark = pytest.mark.root

MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def enforcement() -> None:
    found = find_enforcement()
    if found.options != ("cpus", "memory_gib"):
        pytest.skip(f"no control groups can be made here: {found}")


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(), nodes=1, concurrency=2, console=False) as opened:
        agent = Faults(opened).agent()
        yield opened
    until(lambda: groups_of_node(agent) == [])


def groups_of_node(agent: int) -> list[Path]:
    """Return the folders of a node in all hierarchies."""
    folders = {above for group in groups_of() for above in (Path(group.folder), Path(group.folder).parent)}
    return [path for folder in folders for path in folder.glob(f"skyward.{agent}.*")]


def groups_of_calls(agent: int) -> list[Path]:
    return [path for node in groups_of_node(agent) for path in node.iterdir() if path.is_dir()]


def folder_of(controller: str) -> Path:
    """Return the control group of this process."""
    return next(
        Path(group.folder)
        for group in groups_of()
        if controller in group.controllers or (Path(group.folder) / f"{controller}.max").exists()
    )


@sky.compute
def place() -> tuple[float | None, float | None, tuple[str, ...], str]:
    info = sky.instance_info()
    assert info is not None
    return info.cpus, info.memory_gib, info.enforced, os.environ["OMP_NUM_THREADS"]


@sky.compute
def fill(mib: int) -> int:
    return len(bytearray(mib * MIB))


@sky.compute
def throttled(cpus: float) -> bool:
    """Work until the kernel has held this process back once."""
    until(lambda: sum(range(50_000)) and "nr_throttled 0\n" not in (folder_of("cpu") / "cpu.stat").read_text())
    return True


@sky.compute
def hold(name: str) -> None:
    sky.queue[int](name).put(os.getpid())
    sky.event("never").wait()


def test_a_call_is_held_to_its_processors_and_a_plain_one_is_not(pool: sky.ComputePool) -> None:
    assert throttled.with_options(cpus=0.05)(0.05) >> pool
    assert place.with_options(cpus=2)() >> pool == (2, None, ("cpus",), "2")
    assert place() >> pool == (None, None, (), "1")


def test_a_call_that_exceeds_its_memory_says_so(pool: sky.ComputePool) -> None:
    assert fill.with_options(memory_gib=0.2)(100) >> pool == 100 * MIB
    with pytest.raises(sky.errors.OutOfMemory) as caught:
        fill.with_options(memory_gib=0.2, retries=2)(300) >> pool
    assert str(caught.value) == (
        "'fill' on node 0: its process used more memory than its memory_gib=0.2, and was killed by the kernel (the "
        "pool continues); set a larger memory_gib, or let the call hold less at once"
    )
    assert caught.value.memory_gib == 0.2
    assert isinstance(caught.value, sky.errors.SlotLost)
    assert isinstance(caught.value, MemoryError)


def test_a_call_whose_process_cannot_even_start_within_its_memory_says_so(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.errors.OutOfMemory):
        fill.with_options(memory_gib=0.001)(1) >> pool


def test_values_that_the_program_keeps_do_not_count_for_later_calls(pool: sky.ComputePool) -> None:
    ones = sky.compute(lambda mib: np.ones(mib * MIB // 8)).with_options(memory_gib=0.3)
    kept = [ones(60) >> pool for _ in range(6)]
    assert sum(value.nbytes for value in kept) == 360 * MIB
    held = [ones(60).keep() >> pool for _ in range(6)]
    assert sum(ref.nbytes for ref in held) >= 360 * MIB
    with pytest.raises(sky.errors.OutOfMemory):
        ones(400) >> pool


def test_a_gang_that_exceeds_its_memory_is_not_started_again(pool: sky.ComputePool) -> None:
    rank = sky.integrations.jax(processes_per_node=2)(lambda: len(bytearray(300 * MIB)))
    with pytest.raises(sky.errors.OutOfMemory, match=r"memory_gib=0.3"):
        sky.compute(rank).with_options(memory_gib=0.3, max_restarts=3)() @ pool


def test_another_kill_within_the_limit_is_not_one_of_memory(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.errors.SlotLost) as caught:
        sky.compute(lambda: os.kill(os.getpid(), signal.SIGKILL)).with_options(memory_gib=1)() >> pool
    assert not isinstance(caught.value, sky.errors.OutOfMemory)


def test_the_ranks_of_a_gang_share_their_limits(pool: sky.ComputePool) -> None:
    @sky.compute(cpus=2, memory_gib=0.5)
    @sky.integrations.jax(processes_per_node=2, returns="ranks")
    def rank() -> tuple[str, str, float | None]:
        info = sky.instance_info()
        assert info is not None
        return str(folder_of("memory")), os.environ["OMP_NUM_THREADS"], info.memory_gib

    first, second = rank() @ pool
    assert first == second
    assert first[1:] == ("1", 0.5)
    assert "skyward." in first[0]


class Holder(sky.ActorBase):
    def fill(self, mib: int) -> int:
        return len(bytearray(mib * MIB))

    def enforced(self) -> tuple[str, ...]:
        info = sky.instance_info()
        assert info is not None
        return info.enforced


def test_an_actor_that_exceeds_its_memory_says_so(pool: sky.ComputePool) -> None:
    actor: Any = Holder.with_options(memory_gib=0.2)() >> pool
    assert actor.enforced() >> pool == ("memory_gib",)
    with pytest.raises(sky.errors.ActorLost, match=r"used more memory than its memory_gib=0.2"):
        actor.fill(300) >> pool
    actor.close()


def test_groups_end_with_their_processes(pool: sky.ComputePool) -> None:
    held = hold.with_options(cpus=0.5, memory_gib=0.5)("held") > pool
    pid = pool.queue("held").get()
    before = set(groups_of_calls(Faults(pool).agent()))
    assert before
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(sky.errors.SlotLost):
        held.result()
    place() @ pool
    until(lambda: not all(path.exists() for path in before))


def test_a_pool_of_threads_books_without_limits() -> None:
    with sky.ComputePool(provider=sky.Local(), concurrency=2, executor="thread", console=False) as pool:
        assert (place.with_options(cpus=0.5)() >> pool)[:3] == (None, None, ())


def test_nodes_say_which_limits_they_enforce() -> None:
    events: list[object] = []
    with sky.ComputePool(provider=sky.Local(), console=False, on_event=events.append) as pool:
        place() >> pool
    (ready,) = [event for event in events if isinstance(event, NodeReady)]
    assert ready.limits.startswith("cpus and memory_gib, by control groups of version ")


@pytest.mark.parametrize("victim", ["agent", "watchdog", "standby"])
def test_a_killed_process_of_a_node_leaves_no_group(victim: str) -> None:
    with sky.ComputePool(provider=sky.Local(), console=False) as pool:
        place.with_options(memory_gib=1)() >> pool
        pids = parents_and_agent(pool)
        assert groups_of_calls(pids["agent"])
        os.kill(pids[victim], signal.SIGKILL)
        until(lambda: not groups_of_node(pids["agent"]))


def parents_and_agent(pool: sky.ComputePool) -> dict[str, int]:
    agent = Faults(pool).agent()
    pids = {"agent": agent}
    for name in ("watchdog", "standby"):
        agent = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
        pids[name] = agent
    return pids


CLIENT = """
import skyward as sky
from skyward.testing import Faults
with sky.ComputePool(sky.Local(), console=False) as pool:
    (sky.compute(lambda: None).with_options(memory_gib=1))() >> pool
    print(Faults(pool).agent(), flush=True)
    (sky.compute(lambda: __import__("signal").pause()).with_options(memory_gib=1))() >> pool
"""


def test_the_next_node_removes_groups_of_one_whose_processes_died_at_once(pool: sky.ComputePool) -> None:
    folder = folder_of("memory")
    gone = folder / f"skyward.{os.getpid()}.1.of-a-dead-node" / "1"  # this process began at another time
    if (folder / "cgroup.subtree_control").exists():
        pytest.skip("in version 2 the folder is another one")
    gone.mkdir(parents=True)
    with sky.ComputePool(provider=sky.Local(), console=False) as other:
        place.with_options(memory_gib=1)() >> other
    assert not gone.parent.exists()


def test_a_killed_client_leaves_no_group() -> None:
    with subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        agent = int(client.stdout.readline())
        assert groups_of_calls(agent)
        client.kill()
    until(lambda: not groups_of_node(agent))
