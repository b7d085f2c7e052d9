"""Load of a node's devices, as the panel shows it."""

from __future__ import annotations

import queue
import time

import pytest
import torch

import skyward as sky
from skyward.events import Event, NodeUsage
from skyward.node.agent.usage import devices_of
from tests.gpu.conftest import Device, Figures

pytestmark = pytest.mark.gpu


def busy(device: str, seconds: float) -> None:
    size = 4096 if device == "cuda" else 256
    matrix = torch.randn(size, size, device=device)
    held = torch.ones(2**30 if device == "cuda" else 1, dtype=torch.uint8, device=device)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        (matrix @ matrix).sum().item()
    del held


def test_usage_reports_each_device_while_it_computes(device: Device, count: int, figures: Figures) -> None:
    told: queue.SimpleQueue[NodeUsage] = queue.SimpleQueue()

    def hear(event: Event) -> None:
        if isinstance(event, NodeUsage):
            told.put(event)

    with sky.ComputePool(sky.Local(), on_event=hear) as pool:
        sky.compute(busy)(device, 8.0) >> pool
    usages = []
    while not told.empty():
        usages.append(told.get())
    assert usages
    assert max(usage.cpu for usage in usages) > 0
    devices = [usage.devices for usage in usages if usage.devices]
    assert bool(devices) == (device == "cuda")
    if device == "cuda":
        assert all(len(each) == count for each in devices)
        first = [each[0] for each in devices]
        figures("busy", round(max(each.busy for each in first), 2))
        figures("memory used, GiB", round(max(each.memory_used_gib for each in first), 2))
        assert max(each.busy for each in first) > 0.3
        assert max(each.memory_used_gib for each in first) >= 1
        assert first[0].memory_gib > 1


def test_output_of_nvidia_smi_is_parsed() -> None:
    assert devices_of("0, 37, 1024, 81559, 40\n")[0]["busy"] == 0.37
