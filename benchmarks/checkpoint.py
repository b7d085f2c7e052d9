"""One rank's checkpoint, saved and loaded by skyward and by the libraries beside it, in one run.

    .venv/bin/python benchmarks/checkpoint.py                      # 256 MiB, 5 rounds
    .venv/bin/python benchmarks/checkpoint.py --mib 1024 --rounds 3

For each: how long training is blocked, how long until the checkpoint is durable, its bytes, how long it takes to
load, and the memory that a save needs at its peak. Beside them stand a copy of the same bytes between buffers that
were used before, and a raw write of them with one fsync: what a snapshot and a write can reach at most.

Rounds begin with another method each; the first round is not counted (buffers are made in it). Medians, with the
lowest and highest in brackets.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from skyward.training.checkpoint import CheckpointCoordinator, SharingPattern, StateComponent

State = dict[str, torch.Tensor]


class Holder:
    """What a checkpoint is made of."""

    def __init__(self, state: State) -> None:
        self.state = state

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state = state


@dataclass
class Method:
    """save: writes to a folder, gives a function that waits until it is durable. load: gives the state."""

    name: str
    save: Callable[[State, Path], Callable[[], object]]
    load: Callable[[Path], State] | None = None
    blocked: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    peak_mib: list[float] = field(default_factory=list)
    bytes: int = 0


def state_of(mib: int) -> State:
    """Sizes as a transformer's: a few large tensors, many small ones."""
    torch.manual_seed(0)
    large = 16
    each = (mib << 20) // 4 // large
    state = {f"layer.{at}.weight": torch.randn(each) for at in range(large)}
    return state | {f"layer.{at}.norm": torch.randn(768) for at in range(200)}


def done() -> None:
    """Nothing is left to wait for."""


def raw(state: State, folder: Path) -> Callable[[], object]:
    folder.mkdir()
    with open(folder / "raw", "wb", buffering=0) as file:
        for tensor in state.values():
            view = memoryview(tensor.numpy()).cast("B")
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return done


def torch_save(state: State, folder: Path) -> Callable[[], object]:
    folder.mkdir()
    with open(folder / "state.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return done


def safetensors_save(state: State, folder: Path) -> Callable[[], object]:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(state, folder / "state.safetensors")
    descriptor = os.open(folder / "state.safetensors", os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return done


def safetensors_load(folder: Path) -> State:
    from safetensors.torch import load_file

    return load_file(folder / "state.safetensors")


def dcp_save(state: State, folder: Path) -> Callable[[], object]:
    dcp.save(state, checkpoint_id=folder)
    return done


def dcp_load(folder: Path) -> State:
    state = {name: torch.empty_like(tensor) for name, tensor in STATE.items()}
    dcp.load(state, checkpoint_id=folder)
    return state


def dcp_async(stager: Any) -> Callable[[State, Path], Callable[[], object]]:
    def save(state: State, folder: Path) -> Callable[[], object]:
        future: Any = dcp.async_save(state, checkpoint_id=folder, async_stager=stager)
        return lambda: future.result()  # noqa: PLW0108  # of a type that torch does not say

    return save


PLAIN = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)
"""What a host without an accelerator can do; it keeps its buffers."""


class Skyward:
    """Its coordinator, in a world of one; format: of the file."""

    def __init__(self, kind: str, *, is_async: bool) -> None:
        self.holder = Holder({})
        component = StateComponent("model", self.holder, SharingPattern.REPLICATED, metadata={"format": kind})
        self.coordinator = CheckpointCoordinator([component])
        self.is_async = is_async

    def save(self, state: State, folder: Path) -> Callable[[], object]:
        self.holder.state = state
        if self.is_async:
            self.coordinator.save_checkpoint_async(folder)
            return self.coordinator.wait
        self.coordinator.save_checkpoint(folder)
        return done

    def load(self, folder: Path) -> State:
        self.coordinator.load_checkpoint(folder)
        return self.holder.state


def methods() -> list[Method]:
    ours = {
        f"skyward {kind}{', async' if is_async else ''}": Skyward(kind, is_async=is_async)
        for kind in ("torch", "safetensors")
        for is_async in (False, True)
    }
    return [
        Method("raw write + fsync", raw),
        Method("torch.save", torch_save, lambda folder: torch.load(folder / "state.pt", weights_only=True)),
        Method("safetensors", safetensors_save, safetensors_load),
        Method("DCP", dcp_save, dcp_load),
        Method("DCP async", dcp_async(None), dcp_load),
        Method("DCP async, cached", dcp_async(DefaultStager(PLAIN)), dcp_load),
        *(Method(name, each.save, each.load) for name, each in ours.items()),
    ]


def peak_mib_begin() -> float:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return rss_mib("VmRSS")


def rss_mib(name: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(method: Method, base: Path, *, counts: bool) -> None:
    folder = base / "checkpoint"
    os.sync()
    before = peak_mib_begin()
    begin = time.perf_counter()
    wait = method.save(STATE, folder)
    blocked = time.perf_counter() - begin
    wait()
    durable = time.perf_counter() - begin
    peak = rss_mib("VmHWM") - before
    method.bytes = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    if method.load is not None:
        begin = time.perf_counter()
        state = method.load(folder)
        loaded = time.perf_counter() - begin
        assert all(torch.equal(state[name], tensor) for name, tensor in STATE.items()), method.name
        if counts:
            method.loaded.append(loaded)
    if counts:
        method.blocked.append(blocked)
        method.durable.append(durable)
        method.peak_mib.append(peak)
    shutil.rmtree(folder)


def copy_s(buffers: list[torch.Tensor]) -> float:
    begin = time.perf_counter()
    for to, tensor in zip(buffers, STATE.values(), strict=True):
        to.copy_(tensor)
    return time.perf_counter() - begin


def shown(values: list[float], scale: float = 1e3) -> str:
    if not values:
        return "-"
    low, high = min(values) * scale, max(values) * scale
    return f"{statistics.median(values) * scale:.0f} [{low:.0f}-{high:.0f}]"


def report(found: list[Method], copies: list[float]) -> None:
    print(f"memcpy into used buffers: {shown(copies)} ms")
    print(f"{'':28}{'blocked ms':>20}{'durable ms':>20}{'load ms':>20}{'MiB':>8}{'peak MiB':>10}")
    for each in found:
        print(
            f"{each.name:28}{shown(each.blocked):>20}{shown(each.durable):>20}{shown(each.loaded):>20}"
            f"{each.bytes / (1 << 20):>8.0f}{statistics.median(each.peak_mib):>10.0f}"
        )
    by_name = {each.name: each for each in found}
    median = statistics.median
    raw_s, copy = median(by_name["raw write + fsync"].durable), median(copies)
    for kind in ("torch", "safetensors"):
        ours = by_name[f"skyward {kind}, async"]
        write_s = median(ours.durable) - median(ours.blocked)
        print(
            f"skyward {kind}, async: blocked {median(ours.blocked) / copy:.2f} x memcpy, "
            f"{median(ours.blocked) / median(by_name['DCP async, cached'].blocked):.2f} x DCP async; "
            f"write at {raw_s / write_s:.0%} of raw; "
            f"load {median(ours.loaded) / median(by_name['DCP'].loaded):.2f} x DCP"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="torch's; 0: as many as it takes")
    parser.add_argument("--folder", default=None, help="on the disk to be measured")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    global STATE
    STATE = state_of(arguments.mib)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/meeting", rank=0, world_size=1)
        found = methods()
        buffers = [tensor.clone() for tensor in STATE.values()]
        copies = []
        for turn in range(arguments.rounds + 1):
            for at in range(len(found)):
                measure(found[(turn + at) % len(found)], Path(scratch), counts=turn > 0)
                copies.append(copy_s(buffers))
        print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {arguments.mib} MiB, ", end="")
        print(f"{arguments.rounds} rounds, {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}")
        report(found, copies)
        dist.destroy_process_group()


STATE: State = {}

if __name__ == "__main__":
    sys.exit(main())
