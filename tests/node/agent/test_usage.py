"""Load of a machine since the last look, not since its start."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward import events
from skyward.node.agent.usage import busy_and_total, devices_of, memory_of
from tests.engines import engine_of
from tests.waiting import until


def test_time_waiting_for_a_disk_is_idle_and_guests_count_once() -> None:
    #              user nice system idle iowait irq softirq steal guest guest_nice
    stat = "cpu  100 10 50 800 40 5 5 10 60 0\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 5\n"
    assert busy_and_total(stat) == (180.0, 1020.0)


def test_an_old_kernel_with_fewer_columns_is_read_too() -> None:
    assert busy_and_total("cpu 1 2 3 4\n") == (6.0, 10.0)
    assert busy_and_total("") == (0.0, 0.0)


def test_memory_that_the_kernel_can_reclaim_counts_as_free() -> None:
    used, total = memory_of("MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\nHugePages_Total: 0\n")
    assert (used, total) == (2.0, 8.0)
    assert memory_of("") == (0.0, 0.0)


def test_devices_are_read_and_a_slice_without_figures_counts_as_zero() -> None:
    text = "0, 97, 20480, 81920, 61\n1, [N/A], [Insufficient Permissions], 81920, [N/A]\nNo devices were found\n"
    assert devices_of(text) == [
        {"index": 0.0, "busy": 0.97, "memory_used_gib": 20.0, "memory_gib": 80.0, "celsius": 61.0},
        {"index": 1.0, "busy": 0.0, "memory_used_gib": 0.0, "memory_gib": 80.0, "celsius": 0.0},
    ]


@sky.compute
def burn(stop: Path) -> None:
    while not stop.exists():
        pass


def test_a_pool_with_a_listener_reports_the_load_of_its_nodes(tmp_path: Path) -> None:
    with sky.ComputePool(sky.Local()) as pool:
        busy = burn(tmp_path / "stop") > pool
        until(busy.running)
        began = time.time()
        stream = pool.events()
        told = [next(e for e in stream if isinstance(e, events.NodeUsage)) for _ in range(2)]
        (tmp_path / "stop").touch()
        busy.result(60)
    usage = told[1]
    assert usage.node == 0
    assert usage.cores == os.cpu_count()
    assert usage.cpu >= 0.5 / usage.cores
    assert usage.memory_gib == pytest.approx(psutil.virtual_memory().total / 2**30)
    assert 0 < usage.memory_used_gib < usage.memory_gib
    assert 3.9 < told[1].at - began < 40  # every two seconds, and each may come late


def test_a_pool_without_a_listener_does_not_query_its_nodes() -> None:
    heard: list[object] = []
    with sky.ComputePool(sky.Local(), on_event=heard.append) as pool:
        pass
    assert not [event for event in heard if isinstance(event, events.NodeUsage)]  # it comes after 2 s
    with sky.ComputePool(sky.Local()) as pool:
        # Nothing else shows that no query is sent: an answer without a listener is dropped.
        assert engine_of(pool).nodes._usage_tenths == 0
