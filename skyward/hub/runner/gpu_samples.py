"""Samples of the load of a job's GPUs, from what its nodes tell every two seconds."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...events.periodic import DeviceUsage, NodeUsage

SAMPLE_S = 30.0
"""Seconds between two samples, at least."""
FIRST_S = 2.0
"""Seconds from the first reading to the first sample. Until then, the other nodes have told theirs."""
MOST_GPUS = 1024
"""GPUs of a sample. Those behind them are left out."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(slots=True)
class _GpuLoad:
    """Readings of a GPU since the last sample."""

    count: int
    busy: float
    last: DeviceUsage


class GpuSamples:
    """Load of the GPUs of a runner's pool since the last sample. Thread-safe."""

    def __init__(self) -> None:
        self._own: Mapping[int, frozenset[int]] | None = {}
        self._lock = threading.Lock()
        self._loads: dict[tuple[int, int], _GpuLoad] = {}
        self._next_at = math.inf

    def watch(self, own: Mapping[int, frozenset[int]] | None) -> None:
        """Take the load of these GPUs from now on, see `own_gpus`. Before, there are no samples."""
        with self._lock:
            self._own = own

    def begin(self) -> None:
        """Start again: another job uses the GPUs from now on."""
        with self._lock:
            self._loads, self._next_at = {}, math.inf

    def add(self, usage: NodeUsage) -> None:
        """Take the load of a node."""
        with self._lock:
            for device in usage.devices:
                if self._own is None or device.index in self._own.get(usage.node, ()):
                    load = self._loads.setdefault((usage.node, device.index), _GpuLoad(0, 0.0, device))
                    load.count, load.busy, load.last = load.count + 1, load.busy + device.busy, device
            if self._loads and self._next_at == math.inf:
                self._next_at = time.monotonic() + FIRST_S

    def take(self) -> list[dict[str, Any]]:
        """Return a sample, as the hub takes it: the mean utilization, and the latest of everything else.

        It is empty before the next one is due, and if no node has told anything since the last one.
        """
        with self._lock:
            if not self._loads or time.monotonic() < self._next_at:
                return []
            self._next_at = time.monotonic() + SAMPLE_S
            loads, self._loads = self._loads, {}
        return [
            {
                "node": node,
                "gpu": gpu,
                "busy": load.busy / load.count,
                "memory_used_gib": load.last.memory_used_gib,
                "memory_gib": load.last.memory_gib,
                "celsius": load.last.celsius,
            }
            for (node, gpu), load in sorted(loads.items(), key=lambda item: item[0])[:MOST_GPUS]
        ]


def own_gpus(launch: Mapping[str, Any]) -> Mapping[int, frozenset[int]] | None:
    """Return node of the pool -> indices of the GPUs of an attempt. None: all that its nodes have.

    Nodes tell of each GPU of their machine. Call it when the pool was made: nodes on this machine divide the GPUs that
    this process then sees, and names other than numbers cannot be found in the report.
    """
    machines, nodes, numbers = launch["machines"], launch["nodes"], launch["devices"]
    if not machines["accelerator"]:
        return {}
    if not numbers:
        return None
    if machines["provider"]["type"] != "local":
        return {node: frozenset(numbers) for node in range(len(nodes))}
    names = os.environ.get(VISIBLE, "").split(",")
    shares = (names[node * len(numbers) : (node + 1) * len(numbers)] for node in range(len(nodes)))
    return {node: frozenset(int(name) for name in share if name.isdecimal()) for node, share in enumerate(shares)}
