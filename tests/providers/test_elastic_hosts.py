"""Elastic pools on hosts of one's own: they take further hosts and give them back."""

from __future__ import annotations

from typing import Any

import skyward as sky
from skyward.events import Event, PoolScaled
from tests.providers.conftest import Hosts
from tests.waiting import until

# They travel by value, because this module is not on the nodes.
node = sky.compute(lambda: __import__("skyward").instance_info().node)
block = sky.compute(lambda number: bytes([number]) * (1 << 21))
size = sky.compute(lambda values: (len(values), __import__("skyward").instance_info().node))


def test_a_pool_grows_to_a_second_host_and_gives_it_back(sshds: Hosts) -> None:
    """The second entry wins, because the first has too few hosts for the pool at its largest."""
    events: list[Event] = []
    pool = sky.ComputePool(
        any_of=[sshds.ssh("host0"), sshds.ssh()],
        selection="first",
        nodes=(1, 2),
        engine="direct",  # else the first node has on the way what goes to the second: tests/hosts/test_pools.py
        idle_timeout_s=3.0,
        logs=False,
        console=False,
        on_event=events.append,
    )
    with pool:
        assert node() @ pool == [0]
        early = pool.put(bytes(1 << 20), nodes=[0, 1])
        pool.scale(2)
        assert node() @ pool == [0, 1]
        assert size(early) >> pool.node(1) == (1 << 20, 1)
        kept = pool.put(bytes(1 << 21), nodes=[1])
        assert size(kept) >> pool == (1 << 21, 1), "it runs where the value is"
        kept.drop()
        early.drop()
        pool.scale(None)
        until(lambda: pool.nodes == 1, 60)
        assert node() @ pool == [0]
    assert [(event.before, event.nodes) for event in events if isinstance(event, PoolScaled)] == [(1, 2), (2, 1)]


def test_a_value_moves_to_the_host_that_stays(sshds: Hosts) -> None:
    options: dict[str, Any] = {"idle_timeout_s": 3.0, "logs": False, "console": False}
    pool = sky.ComputePool(sshds.ssh(), nodes=(1, 2), engine="direct", **options)  # by Ray: tests/hosts/test_elastic.py
    with pool:
        pool.scale(2)
        other = block(6).keep() >> pool.node(0)
        kept, put = block(7).keep() >> pool.node(1), pool.put(bytes(1 << 20), nodes=[1])
        assert kept.nodes == put.nodes == (1,)
        pool.scale(None)
        until(lambda: pool.nodes == 1, 60)
        assert kept.nodes == other.nodes == (0,)
        assert size(kept) >> pool == (1 << 21, 0)
        assert kept.get() == bytes([7]) * (1 << 21)
        assert size(put) >> pool == (1 << 20, 0)
