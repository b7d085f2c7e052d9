"""kill -9 of each kind of process while a pool is open: the pool reports the loss and goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, ParamSpec, TypeVar

import pytest

import skyward as sky
from skyward.errors import NodeError, NodeLost, SlotLost
from skyward.integrations.base import IntegrationBase, integrate
from skyward.values.topology import Rank
from tests.waiting import until

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Sandbox

P = ParamSpec("P")
T = TypeVar("T")


@sky.compute
def pid() -> int:
    return os.getpid()


@sky.compute
def node() -> int:
    info = sky.instance_info()
    assert info is not None
    return info.node


@sky.compute
def hang(begun: Path) -> None:
    begun.touch()
    time.sleep(600)


def squared(x: int) -> int:
    time.sleep(0.002)
    return x * x


@contextlib.contextmanager
def local_pool(
    sandbox: Sandbox, *, nodes: int = 2, concurrency: int = 1, lease_s: float = 5.0
) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(sky.Local(lease_s=lease_s), nodes=nodes, concurrency=concurrency, logs=False) as pool:
        yield pool
    sandbox.proves_nothing_is_left()


def test_the_death_of_a_slot_is_reported_and_the_pool_goes_on(inside: Sandbox) -> None:
    with local_pool(inside, nodes=1, concurrency=2) as pool:
        future = hang(inside.folder / "begun") > pool
        inside.waits_for("begun")
        inside.kills("slot")
        with pytest.raises(SlotLost) as caught:
            future.result(60)
        assert caught.value.signal == signal.SIGKILL
        assert caught.value.started is True
        assert [pid() >> pool for _ in range(4)]


def test_a_call_with_retries_survives_the_death_of_its_slot(inside: Sandbox) -> None:
    @sky.compute(retries=1)
    def die_once(folder: Path) -> str:
        if not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "second"

    with local_pool(inside, nodes=1) as pool:
        assert (die_once(inside.folder) >> pool) == "second"


def test_the_death_of_a_zygote_ends_its_calls_and_the_pool_goes_on(inside: Sandbox) -> None:
    with local_pool(inside, nodes=1, concurrency=2) as pool:
        future = hang(inside.folder / "begun") > pool
        inside.waits_for("begun")
        inside.kills("zygote")
        with pytest.raises(SlotLost):
            future.result(60)
        for _ in range(3):
            assert (pid() >> pool) > 0


def test_a_lost_node_is_reported_and_replaced(inside: Sandbox) -> None:
    with local_pool(inside) as pool:
        agents = inside.pids("agent")
        futures = [hang(inside.folder / f"begun{i}") > pool for i in range(2)]
        for i in range(2):
            inside.waits_for(f"begun{i}")
        os.kill(agents[0], signal.SIGKILL)
        done, others = wait(futures, 20, FIRST_COMPLETED)
        (lost,), (other,) = done, others
        error = lost.exception()
        assert isinstance(error, NodeLost)
        assert error.started is not False
        other.cancel()
        assert (node() @ pool) == [0, 1], "the replacement takes the place of the lost node"
        assert len(set(inside.pids("agent")) - set(agents)) == 1
        assert pool.map(squared, range(500)) == [x * x for x in range(500)]


def standbys_of_this_process(sandbox: Sandbox) -> set[int]:
    """Return the standbys that run. A watchdog whose standby was killed has another parent for a moment."""
    return {process.pid for process in sandbox.processes() if process.parent == os.getpid()}


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.2])
def test_a_replacement_that_is_killed_while_it_starts_is_replaced_too(inside: Sandbox, delay_s: float) -> None:
    with local_pool(inside, nodes=1) as pool:
        known = standbys_of_this_process(inside)
        inside.kills("agent")
        for _ in range(2):
            until(lambda: standbys_of_this_process(inside) - known)
            time.sleep(delay_s)  # another moment of its start
            for new in standbys_of_this_process(inside) - known:
                known.add(new)
                os.kill(new, signal.SIGKILL)  # a child of this process: its id stays until it was waited for
        recovers(pool, [0])


def test_all_nodes_lost_at_once_are_replaced(inside: Sandbox) -> None:
    with local_pool(inside) as pool:
        assert (node() @ pool) == [0, 1]
        inside.kills("agent")
        recovers(pool)


def test_a_broadcast_to_a_lost_node_waits_for_its_replacement_or_fails(inside: Sandbox) -> None:
    with local_pool(inside) as pool:
        assert (node() @ pool) == [0, 1]
        (first, _) = inside.pids("agent")
        os.kill(first, signal.SIGKILL)
        with contextlib.suppress(NodeLost):  # it may have been sent before the loss was noticed
            assert (node() @ pool) == [0, 1]
        assert (node() @ pool) == [0, 1]


def test_a_map_goes_on_when_a_slot_dies_under_it(inside: Sandbox) -> None:
    with local_pool(inside, nodes=1, concurrency=2) as pool:
        values = pool.imap(squared_with_retries, range(2000))
        got = [next(values) for _ in range(50)]
        os.kill(inside.pids("slot")[0], signal.SIGKILL)
        got.extend(values)
        assert got == [x * x for x in range(2000)]


@sky.compute(retries=2)
def squared_with_retries(x: int) -> int:
    time.sleep(0.001)
    return x * x


def test_a_map_goes_on_when_a_node_dies_under_it(inside: Sandbox) -> None:
    with local_pool(inside) as pool:
        values = pool.imap(squared_with_retries, range(2000))
        got = [next(values) for _ in range(50)]
        os.kill(inside.pids("agent")[0], signal.SIGKILL)
        got.extend(values)
        assert got == [x * x for x in range(2000)]


def test_the_death_of_a_watchdog_ends_its_node_which_is_replaced(inside: Sandbox) -> None:
    with local_pool(inside, nodes=1) as pool:
        future = hang(inside.folder / "begun") > pool
        inside.waits_for("begun")
        inside.kills("watchdog")
        with pytest.raises(NodeLost):
            future.result(60)
        assert (node() @ pool) == [0]


def test_a_slot_that_dies_while_idle_is_replaced(inside: Sandbox) -> None:
    with local_pool(inside, nodes=1) as pool:
        before = pid() >> pool
        inside.kills("slot")
        for _ in range(3):
            with contextlib.suppress(SlotLost):
                pid() >> pool
        assert (pid() >> pool) != before


def test_a_stopped_slot_does_not_hinder_the_end_of_its_pool(inside: Sandbox) -> None:
    with local_pool(inside, nodes=1, concurrency=2) as pool:
        pid() >> pool
        for slot in inside.pids("slot"):
            os.kill(slot, signal.SIGSTOP)


def test_a_stopped_agent_does_not_hinder_the_end_of_its_pool(inside: Sandbox) -> None:
    with local_pool(inside, nodes=1) as pool:
        pid() >> pool
        for agent in inside.pids("agent"):
            os.kill(agent, signal.SIGSTOP)


def test_a_stream_whose_node_dies_raises_node_lost(inside: Sandbox) -> None:
    with local_pool(inside) as pool:
        items = endless() >> pool
        assert next(items) == 0
        inside.kills("agent")
        with pytest.raises(NodeLost):
            for _ in items:
                pass
        recovers(pool)


def test_calls_that_were_never_sent_move_to_the_replacement(inside: Sandbox) -> None:
    with local_pool(inside, nodes=1) as pool:
        items = endless() >> pool
        assert next(items) == 0
        waiting = [pid() > pool for _ in range(3)]
        inside.kills("agent")
        with pytest.raises(NodeLost):
            for _ in items:
                pass
        assert all(future.result(60) > 0 for future in waiting)


@sky.compute
def endless() -> Iterator[int]:
    for i in range(1 << 40):
        yield i
        time.sleep(0.01)


@dataclass(frozen=True, kw_only=True)
class PlainGang(IntegrationBase):
    """Integration that makes a gang and does nothing else."""

    name: ClassVar[str] = "plain"
    extra: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()

    def session(self, rank: Rank) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def plain_gang(fn: Callable[P, T]) -> Callable[P, T]:
    return integrate(fn, PlainGang())


@sky.compute
@plain_gang
def world() -> int | None:
    info = sky.instance_info()
    assert info is not None
    return info.world_size


@sky.compute
@plain_gang
def hang_in_a_gang(begun: Path) -> None:
    begun.touch()
    time.sleep(600)


def recovers(pool: sky.ComputePool, nodes: Sequence[int] = (0, 1)) -> None:
    """Wait until the pool works again.

    Losses can be noticed one after another, so some calls raise NodeLost before that.
    """
    for _ in range(4):
        with contextlib.suppress(NodeError):
            node() @ pool
    assert (node() @ pool) == list(nodes)


def test_a_gang_fails_when_its_head_is_lost_before_it_began(inside: Sandbox) -> None:
    with local_pool(inside) as pool:
        assert (node() @ pool) == [0, 1]
        agents = inside.pids("agent")
        for agent in agents:  # none can answer the request for a port
            os.kill(agent, signal.SIGSTOP)
        future = pool.submit(world())  # it has asked for the port when this returns
        inside.kills("agent")
        with pytest.raises(NodeLost):
            future.result(60)
        recovers(pool)
        assert (world() @ pool) == [2, 2]


def test_a_gang_fails_when_its_zygote_dies(inside: Sandbox) -> None:
    with local_pool(inside) as pool:
        future = pool.submit(hang_in_a_gang(inside.folder / "begun"))
        inside.waits_for("begun")
        inside.kills("zygote")
        with pytest.raises(SlotLost):
            future.result(60)
        recovers(pool)
        assert (world() @ pool) == [2, 2]


def test_a_gang_fails_and_ends_when_one_rank_dies(inside: Sandbox) -> None:
    with local_pool(inside) as pool:
        assert (node() @ pool) == [0, 1]
        idle = set(inside.pids("slot"))
        with ThreadPoolExecutor(1) as threads:
            outcome = threads.submit(pool.broadcast, hang_in_a_gang(inside.folder / "begun"))
            inside.waits_for("begun")
            os.kill(max(set(inside.pids("slot")) - idle), signal.SIGKILL)
            with pytest.raises(SlotLost):
                outcome.result(60)
        until(lambda: not set(inside.pids("slot")) - idle)
        assert (world() @ pool) == [2, 2]


def test_threads_of_the_users_site_do_not_reach_the_agent(inside: Sandbox) -> None:
    customized = inside.folder / "customized"
    customized.mkdir()
    thread = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (customized / "sitecustomize.py").write_text(thread)
    image = sky.Image(env={"PYTHONPATH": str(customized)})
    with sky.ComputePool(sky.Local(), image=image, logs=False) as pool:
        assert len(pool.map(squared, range(3))) == 3
        (agent,) = pool.agent_pids().values()
        assert len(os.listdir(f"/proc/{agent}/task")) == 1
        assert b"\0-S\0" in Path(f"/proc/{agent}/cmdline").read_bytes()
    inside.proves_nothing_is_left()


def test_calls_on_a_node_whose_processes_all_die_at_once_fail(inside: Sandbox) -> None:
    customized = inside.folder / "customized"
    customized.mkdir()
    # Standby, watchdog, agent, zygote, slot: each is a fork of the one before.
    (customized / "sitecustomize.py").write_text(
        "import itertools, os\nforks = itertools.count(1)\n"
        "os.register_at_fork(after_in_child=lambda: next(forks) == 4 and os._exit(3))\n"
    )
    image = sky.Image(env={"PYTHONPATH": str(customized)})
    with sky.ComputePool(sky.Local(), image=image, logs=False) as pool:
        with pytest.raises(SlotLost) as caught:
            pid() >> pool
        assert caught.value.exit_code == 3
        with pytest.raises(SlotLost):
            pool.map(squared, range(3))
    inside.proves_nothing_is_left()
