"""Hardware facts of a node: cores, memory, devices."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import asdict
from typing import Any

from ...core.limits import default_blob_limit, file_limit, memory_bytes
from ...wire.tasks import NodeConfig
from .devices import NodeDevices
from .limit_groups import Enforcement


def node_facts(config: NodeConfig, devices: NodeDevices, enforcement: Enforcement) -> dict[str, Any]:
    """Collect plain data for the WELCOME frame.

    `devices` holds the fields of each device that user processes see, `accelerators` their number, and `accelerator`
    the name of the first. `cpus` and `memory_gib` are what these processes share, and `limits` says in words who
    enforces the numbers of calls. `blob_limit_bytes` is what the node keeps in memory; the rest is the machine's.

    Args:
        config: Configuration of the node.
        devices: Its devices.
        enforcement: Its control groups.
    """
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "cores": os.cpu_count() or 1,
        "cpus": config.cores,
        "memory_gib": config.memory_gib or memory_bytes() / 2**30,
        "accelerator": devices.product,
        "accelerators": len(devices),
        "devices": [asdict(device) for device in devices.devices],
        "limits": str(enforcement),
        "files": file_limit(),
        "memory_bytes": memory_bytes(),
        "blob_limit_bytes": config.blob_limit_bytes or default_blob_limit(),
    }
