"""Hardware facts of a node: cores, memory, accelerators."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...core.limits import file_limit, memory_bytes

_NO_DEVICE = "-1"


class Devices(NamedTuple):
    """Accelerators that a process sees, all of one kind."""

    kind: str = ""
    """The driver's name, such as "NVIDIA A100-SXM4-80GB", or only the maker's; empty without a device."""
    variable: str = ""
    """Environment variable that selects among the devices; empty if there is none."""
    names: tuple[str, ...] = ()
    """Names in the spelling of `variable`: an index, or the maker's identifier."""
    ids: tuple[str, ...] = ()
    """Ids in the order of `names`. Within one boot of a machine no two devices share an id."""

    def part(self, node: int, nodes: int) -> tuple[str, ...]:
        """Return the names for one of several nodes on this machine. With fewer devices than nodes, nodes share."""
        share = len(self.names) // nodes
        if share:
            return self.names[node * share : (node + 1) * share]
        return (self.names[node % len(self.names)],) if self.names else ()


def node_facts(env: Mapping[str, str]) -> dict[str, Any]:
    """Collect plain data for the WELCOME frame.

    `accelerators` counts the devices that user processes see, 0 on CPU. `devices` holds ids that no other machine has.

    Args:
        env: environment of the user's processes.
    """
    devices = devices_of_machine(env)
    boot = _read(Path("/proc/sys/kernel/random/boot_id")).strip() or socket.gethostname()
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "cores": os.cpu_count() or 1,
        "accelerator": devices.kind,
        "accelerators": len(devices.names),
        "devices": [f"{boot}/{device}" for device in devices.ids],
        "files": file_limit(),
        "memory_bytes": memory_bytes(),
    }


def devices_of_machine(env: Mapping[str, str], root: Path = Path("/")) -> Devices:
    """Find the devices below `root` that a process with `env` sees. Loads no driver."""
    for kind, variable, pattern in (
        ("NVIDIA", "CUDA_VISIBLE_DEVICES", "dev/nvidia[0-9]*"),
        ("Neuron", "NEURON_RT_VISIBLE_CORES", "dev/neuron[0-9]*"),
        ("TPU", "", "dev/accel[0-9]*"),
        ("AMD", "HIP_VISIBLE_DEVICES", "sys/class/kfd/kfd/topology/nodes/*/gpu_id"),
    ):
        paths = [path for path in root.glob(pattern) if kind != "AMD" or _read(path).strip() not in ("", "0")]
        if paths:
            ids = sorted((str(path.relative_to(root)) for path in paths), key=_by_number)
            name = _nvidia_name(root) if kind == "NVIDIA" else kind
            return _visible(Devices(name, variable, tuple(map(str, range(len(ids)))), tuple(ids)), env)
    return Devices()


def _by_number(path: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", path)]


def _visible(devices: Devices, env: Mapping[str, str]) -> Devices:
    """Keep the devices that the variable selects. As in CUDA, an unknown index hides all that follow it."""
    chosen = env.get(devices.variable) if devices.variable else None
    if chosen is None:
        return devices
    by_name = dict(zip(devices.names, devices.ids, strict=True))
    names: list[str] = []
    for part in chosen.split(","):
        name = part.strip()
        if name in ("", _NO_DEVICE) or (name.isdecimal() and name not in by_name):
            break
        names.append(name)
    names = names[: len(devices.names)]
    return devices._replace(names=tuple(names), ids=tuple(by_name.get(name, name) for name in names))


def _nvidia_name(root: Path) -> str:
    for path in root.glob("proc/driver/nvidia/gpus/*/information"):
        for line in _read(path).splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "NVIDIA"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # no such file, so another kind of machine
        return ""
