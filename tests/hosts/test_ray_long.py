"""Faults of pools on Ray that take minutes, for `make chaos`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from tests.chaos.schedule import SEED_VARIABLE
from tests.hosts import test_ray
from tests.hosts.chaos import hidden
from tests.hosts.faults import Ledger, Place, noted
from tests.hosts.test_ray import CUT_S, LIMIT_S, OnRay, kill_of_ray, remove_key, train_without_ray, where
from tests.waiting import until

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.slow,
    pytest.mark.skipif(SEED_VARIABLE not in os.environ, reason="takes minutes; run `make chaos ENGINE=ray`"),
    pytest.mark.timeout(600),
]

on_ray = test_ray.on_ray


class TestLong:
    """Tests that share one pool."""

    def test_a_gang_of_two_minutes_goes_on_without_ray_for_90_seconds(self, on_ray: OnRay) -> None:
        train_without_ray(on_ray, 90.0)

    def test_calls_go_on_while_the_head_is_cut_off_from_the_program_for_half_a_minute(
        self, on_ray: OnRay, ledger_of: Callable[[Place], Ledger]
    ) -> None:
        until(lambda: on_ray.pool.engine == "ray", within_s=LIMIT_S)
        ledger, first = ledger_of(on_ray.place), on_ray.place.hosts[0]
        on_ray.begin_calls()
        futures = {n: ledger.submit(noted(ledger.path, 0.25)(n) > on_ray.pool, n) for n in range(360)}
        until(lambda: len(ledger.ran()) > 12)
        with hidden(first, on_ray.place.bed):
            time.sleep(CUT_S - 5.0)
            before = len(ledger.ran())
            time.sleep(5.0)
            assert len(ledger.ran()) > before, "the head and Ray go on"
        assert ledger.settle(futures) == {}
        assert set(ledger.ran().values()) == {1}
        assert on_ray.pool.engine == "ray"
        on_ray.end_calls()

    def test_ray_is_started_again_on_a_node_that_cannot_read_its_key(self, on_ray: OnRay) -> None:
        until(lambda: on_ray.pool.engine == "ray", within_s=LIMIT_S)
        on_ray.begin_calls()
        host = on_ray.place.hosts[1]
        remove_key(host)
        kill_of_ray(host, "ray::Bridge")
        until(lambda: on_ray.pool.engine == "direct", within_s=LIMIT_S)
        assert where() @ on_ray.pool == [host.name for host in on_ray.place.hosts]
        until(lambda: on_ray.pool.engine == "ray", within_s=LIMIT_S)
        on_ray.end_calls()
