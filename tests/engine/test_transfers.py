"""Blobs from node to node: they pass the program by, unless the nodes cannot reach each other."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.errors import RefLost, UsageError
from skyward.events import ValueRerouted
from skyward.values.machine import Machine
from skyward.values.topology import Peer
from skyward.wire.blobs import Blob
from skyward.wire.payloads import encode
from tests.channels import Relayed
from tests.engine.parts import Parts
from tests.engines import engine_of, hosted_pool
from tests.waiting import open_files, until

SIZE = 8 * 500_000


@sky.compute
def numbers(start: int) -> Any:
    return np.arange(start, start + SIZE // 8, dtype=np.float64)


@sky.compute
def first(array: Any) -> float:
    return float(array[0])


@dataclass(frozen=True, kw_only=True)
class Watched(Relayed):
    """Nodes of this machine as if elsewhere, whose links are counted and whose agents are known."""

    address: str = "127.0.0.1"
    agents: dict[int, int] = field(default_factory=dict)

    def _relayed(self, machine: Machine) -> Machine:
        self.agents[machine.node] = machine.pid
        return replace(super()._relayed(machine), peer=Peer(node=machine.node, private_ip=self.address))

    def carried(self) -> int:
        """Return the bytes that the links of all nodes have carried. A new relay reads modules too, but writes none."""
        texts = [Path(f"/proc/{pid}/io").read_text() for node in self.agents for pid in self.relays(node)]
        return sum(int(re.findall(r"wchar: (\d+)", text)[0]) for text in texts)


def rerouted(events: list[sky.events.Event]) -> list[tuple[int, int, str]]:
    return [(event.source, event.node, event.reason) for event in events if isinstance(event, ValueRerouted)]


def test_a_kept_value_passes_the_program_by() -> None:
    events: list[sky.events.Event] = []
    provider = Watched()
    with sky.ComputePool(provider, nodes=3, logs=False, on_event=events.append) as pool:
        first(numbers(0)) @ pool
        before = provider.carried()
        ref = numbers(3).keep() >> pool.node(0)
        assert first(ref) @ pool == [3.0] * 3
        assert ref.nodes == (0, 1, 2)
        for _ in range(5):
            kept = [numbers(node).keep() >> pool.node(node) for node in range(3)]
            assert [first(one) @ pool for one in kept] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
            del kept
            gc.collect()
        assert provider.carried() - before < SIZE
        assert not rerouted(events)
        assert ref.get()[1] == 4.0


def test_nodes_that_do_not_reach_each_other_get_values_through_the_program() -> None:
    events: list[sky.events.Event] = []
    with sky.ComputePool(Watched(address="127.0.0.9"), nodes=2, logs=False, on_event=events.append) as pool:
        ref = numbers(3).keep() >> pool.node(0)
        assert first(ref) >> pool.node(1) == 3.0
        assert first(numbers(4).keep() >> pool.node(0)) >> pool.node(1) == 4.0
        assert first(numbers(5).keep() >> pool.node(1)) >> pool.node(0) == 5.0
        # Two nodes that have failed once are not asked again.
        until(lambda: len(rerouted(events)) == 2)
        assert [event[:2] for event in rerouted(events)] == [(0, 1), (1, 0)]


@dataclass(frozen=True, kw_only=True)
class WatchedApart(Watched):
    """Nodes of which nobody reaches the first one."""

    def _relayed(self, machine: Machine) -> Machine:
        address = "127.0.0.9" if machine.node == 0 else "127.0.0.1"
        return replace(super()._relayed(machine), peer=Peer(node=machine.node, private_ip=address))


def test_a_value_comes_from_another_node_before_the_program_passes_it_on() -> None:
    events: list[sky.events.Event] = []
    provider = WatchedApart()
    with sky.ComputePool(provider, nodes=3, logs=False, on_event=events.append) as pool:
        ref = numbers(3).keep() >> pool.node(0)
        assert first(ref) >> pool.node(1) == 3.0
        before = provider.carried()
        assert first(ref) >> pool.node(2) == 3.0
        assert provider.carried() - before < SIZE
        until(lambda: [event[:2] for event in rerouted(events)] == [(0, 1), (0, 2)])


def test_a_pool_may_send_all_values_through_the_program() -> None:
    provider, events = Watched(), list[sky.events.Event]()
    with sky.ComputePool(provider, nodes=2, logs=False, direct_transfers=False, on_event=events.append) as pool:
        before = provider.carried()
        assert first(numbers(3).keep() >> pool.node(0)) >> pool.node(1) == 3.0
        assert provider.carried() - before > 2 * SIZE
        assert not rerouted(events)
    with pytest.raises(UsageError, match="direct_transfers='no': not supported; use one of True, False"):
        sky.ComputePool(direct_transfers="no")  # type: ignore[arg-type]


def test_a_value_whose_only_node_dies_on_the_way_is_lost() -> None:
    provider = Watched(lease_s=30.0)
    with sky.ComputePool(provider, nodes=3, logs=False) as pool:
        one = numbers(1).keep() >> pool.node(1)
        two = numbers(2).keep() >> pool.node(1)
        assert first(two) >> pool.node(2) == 2.0
        agent = pool.agent_pids()[1]
        os.kill(agent, signal.SIGSTOP)  # it does not answer an offer
        lost = first(one) > pool.node(0)
        found = first(two) > pool.node(0)
        os.kill(agent, signal.SIGKILL)
        with pytest.raises(RefLost):
            lost.result(60)
        assert found.result(60) == 2.0
        assert sky.compute(abs)(-1) @ pool == [1, 1, 1]


def test_arguments_for_all_nodes_of_a_hosted_pool_cross_the_uplink_once() -> None:
    events: list[sky.events.Event] = []
    provider, array = Watched(), np.arange(SIZE // 8, dtype=np.float64)
    with hosted_pool(provider, nodes=3, logs=False, on_event=events.append) as pool:
        first(array[:10]) @ pool
        before = provider.carried()
        assert first(array) @ pool == [0.0] * 3
        ref = pool.put(array + 1)
        assert first(ref) @ pool == [1.0] * 3
        assert sky.compute(lambda: array[0] + 2)() @ pool == [2.0] * 3
        assert [item for node in range(3) for item in doubled(iter([array + 3])) >> pool.node(node)] == [6.0] * 3
        # The argument, which is in the closure too, and the value go by one link. Items stay in order, on all three.
        assert provider.carried() - before < 5.5 * SIZE
        assert not rerouted(events)


def test_arguments_go_through_the_program_if_the_nodes_of_a_hosted_pool_do_not_reach_each_other() -> None:
    provider, array = Watched(address="127.0.0.9"), np.arange(SIZE // 8, dtype=np.float64)
    with hosted_pool(provider, nodes=3, logs=False) as pool:
        assert first(array) @ pool == [0.0] * 3
        assert first(array + 1) @ pool == [1.0] * 3


@sky.compute
def doubled(arrays: Iterator[Any]) -> Iterator[float]:
    for array in arrays:
        yield 2 * float(array[0])


@sky.compute
def numbers_of_refs(node: Any, count: int = 1) -> list[float]:
    """Read values from another node in a task, each twice and by two threads."""
    refs = [numbers(start).keep() >> node for start in range(count)]
    with ThreadPoolExecutor(2 * count) as threads:
        return [float(array[0]) for array in threads.map(lambda ref: ref.get(), refs * 2)]


def test_a_task_reads_a_value_from_another_node_without_the_program() -> None:
    events: list[sky.events.Event] = []
    provider = Watched()
    with sky.ComputePool(provider, nodes=2, logs=False, on_event=events.append) as pool:
        first(numbers(0)) @ pool
        before = provider.carried()
        assert numbers_of_refs(pool.node(1), 3) >> pool.node(0) == [0.0, 1.0, 2.0] * 2
        assert provider.carried() - before < SIZE
        assert not rerouted(events)


def test_a_value_that_has_come_since_a_task_asked_for_it_is_not_sent_again(parts: Parts) -> None:
    agent = parts.add_node(0)
    with parts.ledger:
        kept = parts.values.kept_on(parts.ledger.links[0], encode(bytes(SIZE), Blob.kept).body)
    (future,) = parts.values.begin_fetch(kept.blobs, 0)
    assert future.result(60) is None
    assert agent.kinds() == []


@pytest.mark.parametrize("reason", ["apart", "switched off"])
def test_a_task_reads_a_value_through_the_program_if_it_must(reason: str) -> None:
    events: list[sky.events.Event] = []
    provider = Watched(address="127.0.0.9" if reason == "apart" else "127.0.0.1")
    is_direct = reason == "apart"
    with sky.ComputePool(provider, nodes=2, logs=False, direct_transfers=is_direct, on_event=events.append) as pool:
        assert numbers_of_refs(pool.node(1), 3) >> pool.node(0) == [0.0, 1.0, 2.0] * 2
        assert numbers_of_refs(pool.node(0)) >> pool.node(1) == [0.0] * 2
        until(lambda: {event[:2] for event in rerouted(events)} == ({(1, 0), (0, 1)} if is_direct else set()))


@pytest.mark.parametrize("killed", ["the node of the value", "the node of the task"])
def test_a_node_that_dies_while_a_task_reads_a_value(killed: str, tmp_path: Path) -> None:
    def read(node: Any, folder: Path) -> str:
        ref = numbers(1).keep() >> node
        (folder / "began").touch()
        until((folder / "go").exists, 60)
        try:
            return str(ref.get()[0])
        except RefLost:
            return "lost"

    # A stopped agent renews no lease, and a loaded machine may take seconds between two lines.
    with sky.ComputePool(Watched(lease_s=30.0), nodes=2, logs=False) as pool:
        reading = sky.compute(read)(pool.node(1), tmp_path) > pool.node(0)
        until((tmp_path / "began").exists)
        task_node = engine_of(pool).ledger.links[0]
        before, agents = task_node.blob_bytes, pool.agent_pids()
        os.kill(agents[1], signal.SIGSTOP)  # it does not answer an offer
        (tmp_path / "go").touch()
        until(lambda: task_node.blob_bytes == before + SIZE)
        if killed == "the node of the value":
            os.kill(agents[1], signal.SIGKILL)
            assert reading.result(60) == "lost"
        else:
            os.kill(agents[0], signal.SIGKILL)
            with pytest.raises(sky.errors.NodeLost):
                reading.result(60)
            os.kill(agents[1], signal.SIGCONT)
        assert sky.compute(abs)(-1) @ pool == [1, 1]
        assert numbers_of_refs(pool.node(1)) >> pool.node(0) == [0.0] * 2


LARGE = 64 << 20
"""Bytes of a value that the buffers of sockets cannot hold."""


@sky.compute
def large(number: int) -> bytes:
    return bytes([number]) * LARGE


@sky.compute
def last(data: bytes) -> int:
    return data[-1]


def stop_in_the_middle(pool: sky.ComputePool) -> tuple[Any, Any]:
    """Stop node 1 while it gets a value from node 0. Return its reference and the future of the call that needs it."""

    def sizes() -> dict[int, int]:
        """Return the sizes of the values that node 1 has or gets, by inode."""
        found = {}
        for file in Path(f"/proc/{pool.agent_pids()[1]}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if "memfd:skyward-blob" in os.readlink(file):
                    status = file.stat()
                    found[status.st_ino] = status.st_size
        return found

    for number in range(1, 20):  # the value may arrive faster than this process looks
        ref = large(number).keep() >> pool.node(0)
        before = sizes()
        future = last(ref) > pool.node(1)
        until(lambda: any(size for inode, size in sizes().items() if inode not in before))  # noqa: B023
        os.kill(pool.agent_pids()[1], signal.SIGSTOP)
        if any(0 < size < LARGE for size in sizes().values()):
            return ref, future
        os.kill(pool.agent_pids()[1], signal.SIGCONT)
        assert future.result(60) == number
    raise AssertionError("every value arrived before it could be stopped")


def test_a_sender_that_is_killed_in_the_middle_loses_the_value() -> None:
    with sky.ComputePool(Watched(lease_s=30.0), nodes=2, logs=False) as pool:
        last(b"x") @ pool
        _, future = stop_in_the_middle(pool)
        sender = pool.agent_pids()[0]
        os.kill(sender, signal.SIGKILL)
        os.kill(pool.agent_pids()[1], signal.SIGCONT)
        with pytest.raises(RefLost):
            future.result(60)
        until(lambda: pool.agent_pids().get(0) not in (None, sender), 60)
        assert sky.compute(abs)(-1) @ pool == [1, 1]
        assert last(large(7)) @ pool == [7, 7]


def test_a_receiver_that_is_killed_in_the_middle_leaves_the_value_where_it_was() -> None:
    def sockets(pid: int) -> int:
        return sum("socket:" in file for file in open_files(pid))

    with sky.ComputePool(Watched(lease_s=30.0), nodes=2, logs=False) as pool:
        last(b"x") @ pool
        ref, future = stop_in_the_middle(pool)
        during = sockets(pool.agent_pids()[0])
        os.kill(pool.agent_pids()[1], signal.SIGKILL)
        with pytest.raises(sky.errors.NodeLost):
            future.result(60)
        until(lambda: sockets(pool.agent_pids()[0]) < during)
        expected = last(ref) >> pool.node(0)
        assert last(ref) @ pool == [expected] * 2  # on the new node, too
