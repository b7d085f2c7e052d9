"""Compare saving and loading one rank's checkpoint: skyward and other libraries, in one run.

    .venv/bin/python benchmarks/checkpoint.py                      # 256 MiB, 9 rounds, 3 minutes
    .venv/bin/python benchmarks/checkpoint.py --mib 1024 --rounds 5 --folder /data
    .venv/bin/python benchmarks/checkpoint.py --orbax ENVIRONMENT/bin/python    # one with orbax-checkpoint
    python3 benchmarks/checkpoint.py --device cuda --mib 1024 --rounds 5        # a state on a GPU

For each method, print how long training is blocked, how long until the checkpoint is durable, its size, how long it
takes to load, and the peak memory of a save. Two reference rows show the limits of a snapshot and of a plain write: a
copy of the same bytes between used buffers, and a raw write with one fsync.

Training is blocked until it may change the state: on a GPU, until the device has copied it. Loading is not compared
there, because some methods load to the GPU and some to the CPU.

Each round begins with another method. The first round is not counted, because it creates the buffers. Times are
medians, with the lowest and highest in brackets. Ratios are taken within each round, with a copy and a raw write
measured directly beside the method. A ratio is shown as its median with a 90 % bootstrap interval. The exit status is 1
if a target is missed.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from checkpoint_methods import Method, Orbax, State, lightning_async, methods, raw, state_of

from skyward.stores.folders import LocalFolder
from skyward.stores.hashed_file import HashingFile
from skyward.training.checkpoint.commit import LocalStaging, new_token
from skyward.training.checkpoint.manifest import Manifest
from skyward.training.checkpoint.writer import serialise
from skyward.training.snapshot import SnapshotPool

RAW, DCP, DCP_ASYNC = "raw write + fsync", "DCP", "DCP async, cached"
OURS = ("skyward torch, async", "skyward safetensors, async")


@dataclass
class Beside:
    """Seconds by round of a copy and a raw write right before one of our saves, and of a second copy right after it."""

    copies: dict[int, float] = field(default_factory=dict)
    raw: dict[int, float] = field(default_factory=dict)


def peak_mib_begin() -> float:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return rss_mib("VmRSS")


def is_on_gpu(state: State) -> bool:
    return next(iter(state.values())).is_cuda


def synchronize(state: State) -> None:
    """Wait until the device has done what was queued: the state may then be changed."""
    if is_on_gpu(state):
        torch.cuda.current_stream().synchronize()


def rss_mib(name: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(method: Method, state: State, folder: Path, turn: int) -> None:
    before = peak_mib_begin()
    begin = time.perf_counter()
    wait = method.save(state, folder)
    synchronize(state)
    method.blocked[turn] = time.perf_counter() - begin
    wait()
    method.durable[turn] = time.perf_counter() - begin
    if turn > 0:
        method.peak_mib.append(rss_mib("VmHWM") - before)
    method.bytes = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    if method.load is not None:
        begin = time.perf_counter()
        loaded = method.load(folder)
        if not is_on_gpu(state):
            method.loaded[turn] = time.perf_counter() - begin
        is_whole = all(torch.equal(loaded[name].to(tensor.device), tensor) for name, tensor in state.items())
        assert is_whole, method.name


def copy_s(buffers: State, state: State) -> float:
    begin = time.perf_counter()
    for name, tensor in state.items():
        buffers[name].copy_(tensor, non_blocking=True)
    synchronize(state)
    return time.perf_counter() - begin


# Parts of a save ----------------------------------------------------------------------------------------------------


class Nowhere:
    def write(self, view: memoryview) -> None:
        """Discard everything that is written."""


def parts_of(state: State, scratch: Path) -> dict[str, list[float]]:
    """Measure each part of a save alone: the seconds of 5 runs."""
    snapshots = SnapshotPool()
    nothing = Manifest(checkpoint_path="checkpoint", world_size=1, timestamp="", components={})
    found: dict[str, list[float]] = {}
    for at in range(6):
        folder = scratch / f"parts-{at}"

        def timed(name: str, begin: float, is_counted: bool = at > 0) -> None:
            if is_counted:
                found.setdefault(name, []).append(time.perf_counter() - begin)

        begin = time.perf_counter()
        snapshots.take(state).release()
        timed("snapshot", begin)
        for kind in ("torch", "safetensors"):
            begin = time.perf_counter()
            serialise(HashingFile(Nowhere()), state, kind)
            timed(f"{kind} into nothing, with digest", begin)
        digest = xxhash.xxh3_128()
        begin = time.perf_counter()
        for tensor in state.values():
            digest.update(memoryview(tensor.numpy()).cast("B"))
        timed("digest alone", begin)
        os.sync()
        staging = LocalStaging(LocalFolder(folder), "checkpoint", new_token())
        staging.begin()
        begin = time.perf_counter()
        with staging.folder.create("file") as file:
            for tensor in state.values():
                file.write(memoryview(tensor.numpy()).cast("B"))
            file.finish()
            timed("write, with digest", begin)
            begin = time.perf_counter()
        timed("fsync", begin)
        begin = time.perf_counter()
        staging.commit(nothing)
        timed("commit", begin)
        shutil.rmtree(folder)
    return found


# Report ------------------------------------------------------------------------------------------------------------


def shown(values: Mapping[int, float] | list[float]) -> str:
    counted = [value for turn, value in values.items() if turn > 0] if isinstance(values, Mapping) else values
    if not counted:
        return "-"
    return f"{statistics.median(counted) * 1e3:.0f} [{min(counted) * 1e3:.0f}-{max(counted) * 1e3:.0f}]"


class Ratio:
    """Ratio of two methods, taken within the rounds they share."""

    def __init__(self, ours: Mapping[int, float], theirs: Mapping[int, float]) -> None:
        self.of_rounds = [ours[turn] / theirs[turn] for turn in ours if turn > 0]
        self.median = statistics.median(self.of_rounds)
        draw = random.Random(0)
        medians = sorted(statistics.median(draw.choices(self.of_rounds, k=len(self.of_rounds))) for _ in range(2000))
        self.low, self.high = medians[100], medians[1900]

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}-{self.high:.2f}]"


def print_times(found: list[Method], beside: Mapping[str, Beside]) -> None:
    copies = [seconds for near in beside.values() for turn, seconds in near.copies.items() if turn > 0]
    print(f"copy into used buffers: {shown(copies)} ms")
    print(f"{'':28}{'blocked ms':>20}{'durable ms':>20}{'load ms':>20}{'MiB':>8}{'peak MiB':>10}")
    for each in found:
        peak = f"{statistics.median(each.peak_mib):.0f}" if each.peak_mib else "-"
        print(
            f"{each.name:28}{shown(each.blocked):>20}{shown(each.durable):>20}{shown(each.loaded):>20}"
            f"{each.bytes / (1 << 20):>8.0f}{peak:>10}"
        )


def print_bars(found: list[Method], beside: Mapping[str, Beside]) -> bool:
    """Print the targets. Returns whether all of them are met."""
    by_name = {each.name: each for each in found}
    are_held = True
    for called, near in beside.items():
        ours = by_name[called]
        write = {turn: ours.durable[turn] - ours.blocked[turn] for turn in ours.durable}
        bars = [
            ("blocked, x copy", Ratio(ours.blocked, near.copies), 1.3),
            ("blocked, x DCP async with cached buffers", Ratio(ours.blocked, by_name[DCP_ASYNC].blocked), 1.0),
            ("background write, x raw write (at most 1 / 80 %)", Ratio(write, near.raw), 1 / 0.8),
        ]
        if ours.loaded:
            bars.append(("load, x DCP", Ratio(ours.loaded, by_name[DCP].loaded), 1.0))
        for name, ratio, bar in bars:
            is_held = ratio.median <= bar
            are_held &= is_held
            print(f"{called:28}{name:50}{ratio!s:>20}   at most {bar:.2f}: {'yes' if is_held else 'NO'}")
    return are_held


def run_rounds(found: list[Method], state: State, rounds: int, scratch: Path, orbax: Orbax | None) -> dict[str, Beside]:
    """Measure every method in every round.

    Returns:
        The reference samples beside our asynchronous methods, by method name.
    """
    host = {name: tensor.cpu() for name, tensor in state.items()}
    buffers = {name: tensor.pin_memory() if is_on_gpu(state) else tensor.clone() for name, tensor in host.items()}
    folder = scratch / "checkpoint"
    beside = {each.name: Beside() for each in found if each.name in OURS}
    for turn in range(rounds + 1):
        for at in range(len(found)):
            method = found[(turn + at) % len(found)]
            near = beside.get(method.name)
            if near is not None:
                bare = Method(RAW, raw)
                os.sync()
                measure(bare, host, folder, turn)
                shutil.rmtree(folder)
                near.raw[turn] = bare.durable[turn]
                before = copy_s(buffers, state)
            os.sync()
            if orbax is not None and method.name.startswith("Orbax"):
                orbax.measure(method, folder, turn)
            else:
                measure(method, host if method.name == RAW else state, folder, turn)
            shutil.rmtree(folder)
            if near is not None:
                near.copies[turn] = (before + copy_s(buffers, state)) / 2
    return beside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 0: torch's default")
    parser.add_argument("--folder", default=None, help="a folder on the disk to measure")
    parser.add_argument(
        "--orbax", default=None, metavar="PYTHON", help="Python of an environment with orbax-checkpoint"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the state is")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    state = state_of(arguments.mib, arguments.device)
    found, left_out = methods(state), []
    try:
        found.append(lightning_async())
    except ImportError as error:
        left_out.append(f"Lightning async is not shown: {error}")
    orbax = Orbax(arguments.orbax, state) if arguments.orbax else None
    if orbax is not None:
        found.append(Method(f"Orbax {orbax.version} async", raw))
    else:
        left_out.append("Orbax async is not shown: it needs JAX, in an environment of its own: --orbax PYTHON")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/meeting", rank=0, world_size=1)
        beside = run_rounds(found, state, arguments.rounds, Path(scratch), orbax)
        if orbax is not None:
            orbax.close()
        if is_on_gpu(state):
            print(f"{torch.cuda.get_device_name()}, ", end="")
        print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {arguments.mib} MiB, ", end="")
        print(f"{arguments.rounds} rounds, {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}")
        print_times(found, beside)
        print("\n".join(left_out))
        if not is_on_gpu(state):
            print("parts of a save, each alone, ms:")
            for name, seconds in parts_of(state, Path(scratch)).items():
                print(f"  {name:40}{shown(seconds):>20}")
        dist.destroy_process_group()
    return 0 if print_bars(found, beside) else 1


if __name__ == "__main__":
    sys.exit(main())
