"""Compare DistributedDataParallel on 2 ranks of this machine: skyward's Local pool beside torchrun.

    python benchmarks/ddp.py                      # about 6 minutes
    python benchmarks/ddp.py --rounds 2 --pairs 5
    python benchmarks/ddp.py --json samples.json

The benchmark needs Linux and an environment with torch. Every round starts both once, in fresh processes, in an order
that changes from round to round. After their first step they train in turns, a fraction of a second each, while the
other waits without using a processor. Other load of the machine therefore affects both alike, and the ratio of two
neighbouring windows says more than two long runs. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from ddp_training import BATCH, train

HERE = Path(__file__).parent
RANKS = 2
THREADS = str(max(1, (os.cpu_count() or 1) // RANKS))
"""Threads of each rank, under both."""
WINDOW_S = 0.2
RESAMPLES = 10_000
LIMIT_S = 120.0
"""Limit in seconds for a gang's first step."""
CALLS = 3
"""Calls in one pool; all after the first count as `second`."""


@dataclass(kw_only=True)
class Samples:
    """Samples of both: seconds, and samples per second of the throughput pairs."""

    torchrun_start: list[float] = field(default_factory=list)
    call_first: list[float] = field(default_factory=list)
    start_first: list[float] = field(default_factory=list)
    call_second: list[float] = field(default_factory=list)
    two_nodes_first: list[float] = field(default_factory=list)
    two_nodes_second: list[float] = field(default_factory=list)
    pairs: list[tuple[float, float]] = field(default_factory=list)
    """(skyward, torchrun)"""


class Gang:
    """Connection from the benchmark to a running training."""

    def __init__(self, server: socket.socket) -> None:
        sock, _ = server.accept()
        self._sock = sock
        self._told: TextIO = sock.makefile("rw")
        hello = json.loads(self._told.readline())
        self.first_step_at: float = hello["first_step"]
        self.threads: int = hello["threads"]

    def run(self, steps: int) -> float:
        """Return samples per second of all ranks together."""
        elapsed: float = json.loads(self._say(steps))["elapsed"]
        return steps * BATCH * RANKS / elapsed

    def _say(self, steps: int) -> str:
        print(steps, file=self._told, flush=True)
        return self._told.readline()

    def end(self) -> None:
        self._say(0)
        self._told.close()
        self._sock.close()


def listen() -> socket.socket:
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(LIMIT_S)
    return server


def environment() -> dict[str, str]:
    root = str(HERE.parent)
    return {**os.environ, "OMP_NUM_THREADS": THREADS, "PYTHONPATH": f"{root}{os.pathsep}{HERE}"}


# Two ways to start --------------------------------------------------------------------------------------------------


def start_torchrun(port: int) -> subprocess.Popen[bytes]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--master-port", str(free), str(HERE / "ddp_training.py"), str(port)]
    return subprocess.Popen(command, env=environment())


def start_skyward(port: int, nodes: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--client", str(port), str(nodes)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)


def client(port: int, nodes: int) -> None:
    """Run the pool in its own process, which reports when it makes each call."""
    import skyward as sky

    function = sky.compute(sky.integrations.torch(backend="gloo", processes_per_node=RANKS // nodes)(train))
    with sky.ComputePool(sky.Local(), nodes=nodes, concurrency=RANKS // nodes) as pool:
        for _ in range(CALLS):
            print(time.monotonic(), flush=True)
            function(port) @ pool


# One round ---------------------------------------------------------------------------------------------------------


def measure(samples: Samples, number: int, pairs: int) -> None:
    gangs: dict[str, Gang] = {}
    with listen() as server:
        port = server.getsockname()[1]
        torchrun: subprocess.Popen[bytes] | None = None
        skyward: subprocess.Popen[str] | None = None
        for name in ("torchrun", "skyward") if number % 2 else ("skyward", "torchrun"):
            begin = time.monotonic()
            if name == "torchrun":
                torchrun = start_torchrun(port)
                gangs[name] = Gang(server)
                samples.torchrun_start.append(gangs[name].first_step_at - begin)
            else:
                skyward = start_skyward(port, 1)
                gangs[name] = Gang(server)
                samples.start_first.append(gangs[name].first_step_at - begin)
                samples.call_first.append(gangs[name].first_step_at - called_at(skyward))
        assert torchrun is not None
        assert skyward is not None
        assert gangs["skyward"].threads == gangs["torchrun"].threads == int(THREADS)
        samples.pairs += in_turns(gangs, pairs)
        gangs["torchrun"].end()
        ended(torchrun)
        samples.call_second += further_calls(server, skyward, gangs["skyward"])
        begin = time.monotonic()
        two_nodes = start_skyward(port, 2)
        gang = Gang(server)
        samples.two_nodes_first.append(gang.first_step_at - called_at(two_nodes))
        samples.two_nodes_second += further_calls(server, two_nodes, gang)


def in_turns(gangs: dict[str, Gang], pairs: int) -> list[tuple[float, float]]:
    for gang in gangs.values():
        gang.run(50)  # warm up
    steps = max(1, round(WINDOW_S * gangs["torchrun"].run(50) / (BATCH * RANKS)))
    found = []
    for pair in range(pairs):
        order = ("skyward", "torchrun") if pair % 2 else ("torchrun", "skyward")
        rates = {name: gangs[name].run(steps) for name in order}
        found.append((rates["skyward"], rates["torchrun"]))
    return found


def further_calls(server: socket.socket, process: subprocess.Popen[str], gang: Gang) -> list[float]:
    """End the first call. Returns the seconds from each later call to its first step."""
    found = []
    gang.end()
    for _ in range(CALLS - 1):
        called = called_at(process)
        gang = Gang(server)
        found.append(gang.first_step_at - called)
        gang.end()
    ended(process)
    return found


def called_at(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    return float(process.stdout.readline())


def ended(process: subprocess.Popen[Any]) -> None:
    if process.stdout is not None:
        process.stdout.close()
    code = process.wait(30)
    assert code == 0, f"{process.args!r} exited with code {code}"


# Report -------------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float], statistic: Callable[[Sequence[float]], float] = median) -> tuple[float, float]:
    """Return the 95 % confidence interval of a statistic, by the percentile bootstrap."""
    generator = random.Random(0)
    found = sorted(statistic(generator.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES)]


def ratio_of_medians(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of two unpaired samples with its 95 % confidence interval."""
    generator = random.Random(0)
    found = sorted(
        median(generator.choices(over, k=len(over))) / median(generator.choices(under, k=len(under)))
        for _ in range(RESAMPLES)
    )
    return median(over) / median(under), found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES)]


def report(samples: Samples) -> bool:
    """Print the tables. Returns whether all targets are met."""
    import torch

    print(f"\nDDP on {RANKS} ranks, gloo, {THREADS} thread(s) each, batch {BATCH} each; torch {torch.__version__}")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {date.today()}\n")
    ours, theirs = (list(rates) for rates in zip(*samples.pairs, strict=True))
    ratios = [a / b for a, b in samples.pairs]
    low, high = interval(ratios)
    print(f"samples per second, median of {len(ratios)} windows of {WINDOW_S} s")
    print(f"  skyward   {median(ours):10,.0f}\n  torchrun  {median(theirs):10,.0f}")
    print(f"  ratio of neighbouring windows, median: {median(ratios):.3f}  [{low:.3f}, {high:.3f}]\n")

    print("seconds to the first step, median [95 % confidence interval]; ratio to torchrun")
    rows = [
        ("torchrun, from its start", samples.torchrun_start),
        ("skyward, first call of a pool", samples.call_first),
        ("skyward, first call, from the start of python", samples.start_first),
        ("skyward, second call", samples.call_second),
        ("skyward, 2 nodes x 1 rank, first call", samples.two_nodes_first),
        ("skyward, 2 nodes x 1 rank, second call", samples.two_nodes_second),
    ]
    compared: dict[str, float] = {}
    for title, values in rows:
        first, last = interval(values)
        ratio, ratio_low, ratio_high = ratio_of_medians(values, samples.torchrun_start)
        compared[title] = ratio
        shown = "" if values is samples.torchrun_start else f"  {ratio:5.2f} [{ratio_low:.2f}, {ratio_high:.2f}]"
        print(f"  {title:46} {median(values):6.2f} [{first:.2f}, {last:.2f}]{shown}")

    targets = [
        ("samples per second, ratio at least 0.98", median(ratios) >= 0.98),
        ("first call no slower than torchrun", compared[rows[1][0]] <= 1),
        ("second call under a quarter of torchrun", compared[rows[3][0]] < 0.25),
    ]
    print()
    for title, is_met in targets:
        print(f"  {'met   ' if is_met else 'MISSED'}  {title}")
    return all(is_met for _, is_met in targets)


def main() -> int:
    parser = argparse.ArgumentParser(description="skyward's Local pool beside torchrun; see the top of this file")
    parser.add_argument(
        "--rounds", type=int, default=10, help="rounds, each with fresh processes of both (default: 10)"
    )
    parser.add_argument("--pairs", type=int, default=40, help="pairs of windows in each round (default: 40)")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument("--client", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(*options.client)
        return 0
    samples = Samples()
    for number in range(options.rounds):
        measure(samples, number, options.pairs)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps(vars(samples)))
    return 0 if report(samples) else 1


if __name__ == "__main__":
    sys.exit(main())
