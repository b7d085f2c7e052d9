"""Random kills, cut cables, notices and scalings under every kind of call, on hosts. For this machine: tests/chaos."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from skyward.providers import ssh
from skyward.providers.remote import bring_up
from tests.chaos.schedule import SEED_VARIABLE, seconds, seeds
from tests.hosts.bed import Bed
from tests.hosts.chaos import ELASTIC_NODES, ELASTIC_WEIGHTS, NOTICE_FILE, RAY_WEIGHTS, WEIGHTS, Chaos
from tests.hosts.faults import Ledger, Place
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.waiting import until

pytestmark = pytest.mark.hosts

ROUND_S = 14.0
RAY_ROUND_S = 60.0
"""Length of a schedule that begins when Ray stands."""
RAY_S = 300.0
"""Longest wait for Ray on a busy machine, whose load runs meanwhile, and unpacks 284 MB on each of three new hosts. It
stands within 20 s on a free one.
"""


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
@pytest.mark.parametrize("seed", seeds(range(1, 11)))
@pytest.mark.timeout(0)
def test_nothing_acknowledged_is_lost_doubled_or_left_on_hosts_by_ray(
    seed: int,
    bed: Bed,
    hosts: Callable[[int], list[Host]],
    ray_index: PackageIndex,
    ledger_of: Callable[[Place], Ledger],
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every second pool is elastic: nodes come and go, and machines are taken back with a notice."""
    monkeypatch.setattr(ssh, "bring_up", partial(bring_up, notice_file=NOTICE_FILE))  # as a cloud's provider does
    here = Place(bed=bed, index=ray_index, hosts=hosts(3))
    for number in rounds(RAY_ROUND_S):
        is_elastic, named = number % 2 == 1, seed + 1000 * number
        nodes, weights = (ELASTIC_NODES, ELASTIC_WEIGHTS) if is_elastic else (3, RAY_WEIGHTS)
        with here.pool(concurrency=2, engine="ray", nodes=nodes) as pool:
            gang_nodes = ELASTIC_NODES[0] if is_elastic else None
            ledger = ledger_of(here)
            chaos = Chaos(pool, here, ledger, runtime, seed=named, weights=weights, gang_nodes=gang_nodes)
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
