"""Random kills, pauses and cut cables under every kind of call, on SSH hosts. For this machine, see tests/chaos."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.schedule import SEED_VARIABLE, seconds, seeds
from tests.hosts.bed import Bed
from tests.hosts.chaos import RAY_WEIGHTS, WEIGHTS, Chaos
from tests.hosts.faults import Ledger, Place
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.waiting import until

pytestmark = pytest.mark.hosts

ROUND_S = 14.0
RAY_ROUND_S = 60.0
"""Length of a schedule that begins when Ray stands."""
RAY_S = 120.0
"""Longest wait for Ray on a busy machine. It stands within 20 s on a free one."""


@pytest.mark.parametrize("seed", seeds([1]))
@pytest.mark.timeout(0)  # each round has its own limits
def test_nothing_acknowledged_is_lost_doubled_or_left_on_hosts_direct(
    seed: int, place: Callable[[int], Place], ledger_of: Callable[[Place], Ledger], runtime: Path
) -> None:
    here = place(2)
    for number in rounds(ROUND_S):
        with here.pool(concurrency=2) as pool:  # checks at its end that nothing runs on the hosts
            chaos = Chaos(pool, here, ledger_of(here), runtime, seed=seed + 1000 * number, weights=WEIGHTS)
            chaos.strike(ROUND_S)
        print(chaos.check())


@pytest.mark.slow
@pytest.mark.skipif(SEED_VARIABLE not in os.environ, reason="test_ray.py has a short one on a pool that it shares")
@pytest.mark.parametrize("seed", seeds([1, 2, 3]))
@pytest.mark.timeout(0)
def test_nothing_acknowledged_is_lost_doubled_or_left_on_hosts_by_ray(
    seed: int,
    bed: Bed,
    hosts: Callable[[int], list[Host]],
    ray_index: PackageIndex,
    ledger_of: Callable[[Place], Ledger],
    runtime: Path,
) -> None:
    here = Place(bed=bed, index=ray_index, hosts=hosts(3))
    for number in rounds(RAY_ROUND_S):
        named = seed + 1000 * number
        with here.pool(concurrency=2, engine="ray") as pool:
            chaos = Chaos(pool, here, ledger_of(here), runtime, seed=named, weights=RAY_WEIGHTS)
            until(lambda pool=pool: pool.engine == "ray", RAY_S)  # type: ignore[misc]
            chaos.strike(min(seconds(RAY_ROUND_S), RAY_ROUND_S))
        print(chaos.check())


def rounds(default_s: float) -> Iterator[int]:
    """Count rounds until the time of the schedule is over."""
    deadline = time.monotonic() + seconds(default_s)
    for number in range(10_000):
        yield number
        if time.monotonic() >= deadline:
            return
