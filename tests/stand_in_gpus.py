"""Stand-ins for machines with GPUs: an `nvidia-smi` that lists devices which do not exist.

Put its folder first on the PATH of a node. The node then finds the devices as it finds real ones.
The file `looks` beside it has a line for each search. The file `load` has the load that it reports each second.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["GPUS", "MIG", "Gpu", "install_smi"]


class Gpu(NamedTuple):
    name: str
    memory_mib: int
    instances: tuple[str, ...] = ()
    """Profiles of its MIG instances."""


GPUS = (Gpu("NVIDIA H100 80GB HBM3", 81559),) * 8
MIG = (Gpu("NVIDIA A100-SXM4-40GB", 40960, ("3g.20gb", "3g.20gb")), Gpu("NVIDIA A100-SXM4-40GB", 40960))

_PROGRAM = """#!/bin/sh
case "$1" in
-L) cat <<'END'
{listing}
END
;;
*mig.mode.current*) echo "$1" >> "$(dirname "$0")/looks"; cat <<'END'
{rows}
END
;;
*utilization.gpu*) while cat "$(dirname "$0")/load"; do sleep 1; done ;;
*) exit 2 ;;
esac
"""


def install_smi(folder: Path, gpus: Sequence[Gpu]) -> str:
    """Write the program, and return a PATH that leads to it and to the programs of the system."""
    rows, listing = [], []
    for number, gpu in enumerate(gpus):
        mode = "Enabled" if gpu.instances else "Disabled"
        uuid = f"GPU-{number:08}-0000-0000-0000-000000000000"
        rows.append(f"{number}, {uuid}, {gpu.name}, {gpu.memory_mib}, {mode}")
        listing.append(f"GPU {number}: {gpu.name} (UUID: {uuid})")
        for at, profile in enumerate(gpu.instances):
            listing.append(f"  MIG {profile}     Device  {at}: (UUID: MIG-{number:08}-{at})")
    load = [
        f"{number}, {10 * number}, {1024 * number}, {gpu.memory_mib}, {40 + number}" for number, gpu in enumerate(gpus)
    ]
    (folder / "load").write_text("\n".join(load) + "\n")
    program = folder / "nvidia-smi"
    program.write_text(_PROGRAM.format(rows="\n".join(rows), listing="\n".join(listing)))
    program.chmod(0o755)
    return f"{folder}:/usr/local/bin:/usr/bin:/bin"
