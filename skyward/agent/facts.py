"""What a node says of itself: cores, memory, accelerators."""

from __future__ import annotations

import glob
import os
import platform
import socket
from typing import Any

__all__ = ["node_facts"]


def node_facts() -> dict[str, Any]:
    """Plain data for the WELCOME frame. `accelerators` counts devices that user code will see, 0 on CPU."""
    kind, count = _accelerators()
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "cores": os.cpu_count() or 1,
        "accelerator": kind,
        "accelerators": count,
    }


def _accelerators() -> tuple[str, int]:
    nvidia = [p for p in glob.glob("/dev/nvidia*") if p.removeprefix("/dev/nvidia").isdigit()]
    if nvidia:
        return _nvidia_name(), _visible(len(nvidia), "CUDA_VISIBLE_DEVICES")
    neuron = glob.glob("/dev/neuron[0-9]*")
    if neuron:
        return "Neuron", _visible(len(neuron), "NEURON_RT_VISIBLE_CORES")
    tpu = glob.glob("/dev/accel[0-9]*")
    if tpu:
        return "TPU", len(tpu)
    amd = glob.glob("/sys/class/kfd/kfd/topology/nodes/*/gpu_id")
    gpus = sum(1 for path in amd if _read(path).strip() not in ("", "0"))
    return ("AMD", _visible(gpus, "HIP_VISIBLE_DEVICES")) if gpus else ("", 0)


def _visible(count: int, variable: str) -> int:
    chosen = os.environ.get(variable)
    if chosen is None:
        return count
    return min(count, len([d for d in chosen.split(",") if d.strip() and d.strip() != "-1"]))


def _nvidia_name() -> str:
    for path in glob.glob("/proc/driver/nvidia/gpus/*/information"):
        for line in _read(path).splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "NVIDIA"


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
