"""Values that stay, on hosts: they go from host to host, or by the program if they must, and die with their host."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import NodeLost, RefLost
from skyward.events import ValueRerouted
from tests.engines import is_moving
from tests.hosts.faults import Place, pids
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

SIZE = 32 << 20

# They travel by value, because this module is not on the nodes.
block = sky.compute(lambda number: bytes([number]) * SIZE)
summary = sky.compute(lambda data: (data[0], len(data)))


def received(place: Place) -> int:
    """Return the bytes that the program's machine got from the hosts. Those between hosts do not count."""
    return int(Path(f"/sys/class/net/{place.bed.name}/statistics/rx_bytes").read_text())


def test_a_value_goes_from_host_to_host_and_by_the_program_if_it_must(place: Callable[[int], Place]) -> None:
    here = place(2)
    events: list[sky.events.Event] = []
    one, other = here.hosts
    with here.pool(on_event=events.append) as pool:
        summary(b"xy") @ pool
        before = received(here)
        kept = block(1).keep() >> pool.node(0)
        assert summary(kept) >> pool.node(1) == (1, SIZE)
        assert summary(block(2).keep()) >> pool.node(0) == (2, SIZE)
        assert received(here) - before < SIZE // 8
        one.hide_from(other.address)
        try:
            kept = block(3).keep() >> pool.node(0)
            assert summary(kept) >> pool.node(1) == (3, SIZE)
        finally:
            one.show_to_all()
        until(lambda: any(isinstance(e, ValueRerouted) for e in events))
        assert [(e.source, e.node, e.size_bytes) for e in events if isinstance(e, ValueRerouted)] == [(0, 1, SIZE)]
        assert received(here) - before > SIZE


def test_a_value_dies_with_its_host_and_a_graph_says_where_it_ended(place: Callable[[int], Place]) -> None:
    here = place(2)
    with here.pool(lease_s=4.0) as pool:
        kept = block(1).keep() >> pool.node(1)
        put = pool.put(b"\7" * SIZE, nodes=[1])
        here.hosts[1].power_loss()
        here.hosts[1].start()
        with pytest.raises((RefLost, NodeLost)):
            summary(kept) >> pool.node(0)
        with pytest.raises(RefLost):
            kept.get()
        assert summary(put).with_options(retries=5) @ pool == [(7, SIZE)] * 2


@pytest.mark.parametrize("killed", [0, 1], ids=["the target", "the source"])
def test_an_agent_that_is_killed_while_a_value_moves_loses_at_most_its_own(
    place: Callable[[int], Place], killed: int
) -> None:
    here = place(2)
    with here.pool(nodes=(1, 2), idle_timeout_s=60.0) as pool:
        pool.scale(2)
        there = block(1).keep() >> pool.node(0)
        moving = block(2).keep() >> pool.node(1)
        (agent,) = pids(here.hosts[killed], "agent")
        os.kill(agent.outside_pid, signal.SIGSTOP)  # a move that has begun cannot end now
        pool.scale(1)
        until(partial(is_moving, pool, moving))
        os.kill(agent.outside_pid, signal.SIGKILL)
        lost, left = (moving, there) if killed else (there, moving)
        with pytest.raises(RefLost):
            lost.get()
        number = 1 if killed else 2
        assert left.get()[:3] == bytes([number]) * 3
        until(lambda: list(pool.agent_pids()) == [0], 60)  # with the value, or else it would stay
        assert left.nodes == (0,)
        assert summary(left).with_timeout(60) >> pool == (number, SIZE)
