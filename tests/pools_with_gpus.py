"""Pools that `test_devices` opens on a machine with two GPUs, in a separate program.

It prints their reports as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, ClassVar

import skyward as sky
from skyward.errors import NoCapacity
from skyward.integrations.base import IntegrationBase, integrate
from skyward.node.slot.runtime import current_rank
from skyward.values.topology import Rank
from tests.waiting import until

__all__ = ["main"]


class Plain(IntegrationBase):
    """Integration whose gang is only processes."""

    name: ClassVar[str] = "plain-ranks"
    extra: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()

    def session(self, rank: Rank) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def visible() -> tuple[str | None, int]:
    info = sky.instance_info()
    assert info is not None
    return os.environ.get("CUDA_VISIBLE_DEVICES"), info.accelerators


def shares_devices() -> bool:
    rank = current_rank()
    assert rank is not None
    return rank.shares_devices


def meet(name: str, other: str) -> None:
    Path(name).touch()
    until(lambda: Path(other).exists())


def opened(**options: Any) -> tuple[list[str], list[Any], list[bool], list[str]]:
    """Return a pool's reports as it opens, its calls' devices, whether its ranks share devices, and the report of
    that.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sky.ComputePool(sky.Local(), **options) as pool:
            seen = sky.compute(visible)() @ pool
            shared = sky.compute(integrate(shares_devices, Plain()))() @ pool
    return [str(w.message) for w in caught], seen, shared, [os.path.basename(w.filename) for w in caught]


def two_gangs(concurrency: int) -> tuple[list[str], list[str]]:
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options: dict[str, Any] = {"concurrency": concurrency, "accelerator": "H100"}
        with sky.ComputePool(sky.Local(), logs=lambda line: lines.append(line.text), **options) as pool:
            gang = sky.compute(integrate(meet, Plain()))
            for _ in range(2):
                for future in [gang("a", "b") > pool, gang("b", "a") > pool]:
                    future.result(timeout=60)
    return [str(w.message) for w in caught], lines


def is_imported(module: str) -> bool:
    return module in sys.modules


def imported_ahead() -> list[bool]:
    """Return whether a new process has the modules that its node was to import ahead.

    One module does nothing, and one does what CUDA does when it is initialised.
    """
    Path("harmless.py").touch()
    Path("initialises_cuda.py").write_text("opened = open('/dev/nvidia-uvm')\n")
    seen = []
    for module in ("harmless", "initialises_cuda"):
        with sky.ComputePool(sky.Local(), preload=(module,)) as pool:
            seen.append(sky.compute(is_imported)(module) >> pool)
    return seen


def main() -> None:
    os.chdir(sys.argv[1])
    sys.path.insert(0, sys.argv[1])
    said: dict[str, Any] = {
        "two nodes": opened(nodes=2),
        "three nodes": opened(nodes=3),
        "chosen": opened(nodes=2, image=sky.Image(env={"CUDA_VISIBLE_DEVICES": "1"})),
        "two gangs": two_gangs(2),
        "two gangs of four slots": two_gangs(4),
        "imported ahead": imported_ahead(),
    }
    try:
        sky.ComputePool(sky.Local(), nodes=2, accelerator=sky.accelerators.H100(count=2)).start()
    except NoCapacity as error:
        said["refused"] = str(error)
    sys.stdout.write(json.dumps(said))
