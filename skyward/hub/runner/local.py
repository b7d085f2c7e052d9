"""The launcher inside one person's hub, and the machine set that this machine is."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.limits import memory_bytes
from ..model.capacity import MachineSetSpec
from .launcher import Launcher

if TYPE_CHECKING:
    from ..client.settings import Address
    from ..services.hub import Hub

LOCAL = "local"


async def start_local_launcher(hub: Hub, address: Address, data: Path, umask: int = -1) -> Launcher:
    """Start a launcher in a thread of this process. A hub without machine sets gets this machine as one.

    The runners that it starts outlive this process, and the next launcher in the folder finds them. `umask` is the mask
    of the files of jobs; -1: that of this process.

    Raises:
        UsageError: Another launcher uses the folder.
    """
    await hub.capacity.declare_first(this_machine())
    launcher = Launcher(address, data / "launcher", umask=umask)
    threading.Thread(target=launcher.run, name="skyward-hub-launcher", daemon=True).start()
    return launcher


def this_machine() -> MachineSetSpec:
    """Return this machine as a set: one node for each processor, each of which may use all of them."""
    cores = os.cpu_count() or 1
    return MachineSetSpec(
        name=LOCAL,
        provider={"type": "local"},
        nodes=cores,
        vcpus=cores,
        memory_gib=memory_bytes() / 2**30,
    )
