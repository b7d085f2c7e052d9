"""Compare a pool whose scheduler runs beside its first node with one whose scheduler runs in the client.

    sudo .make/bench/bin/python benchmarks/cluster.py             # root on Linux; about 4 minutes

In a third pool, Ray carries what goes between the nodes. All use the same 3 hosts of the test bed
(tests/hosts/README.md), one after the other in each round. A relay before each host makes the client distant. Client
and hosts share this machine's cores. The output holds medians with the 10th and 90th percentile, and a verdict for
each target.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import queue
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import workloads
from dispatch import machine
from report import percentile

import skyward as sky
from tests.engines import hosted_pool, raised_pool
from tests.hosts.bed import Bed
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.relay import Relay

HOSTS = 3
RELAY_DELAY_S = 0.05
"""Each way."""
CALLS = 500
DISTANT_CALLS = 20
NESTED_CALLS = 20
UP_LIMIT_S = 120.0

Samples = dict[str, list[float]]

ROWS = (
    ("No-op, one after the other", "noop", "through relays without delay"),
    ("No-op of a distant client", "far/noop", "a round trip to the client is 100 ms"),
    ("Call in a task, both beside the head", "far/nested", "on the same node"),
    ("Call in a task, on another node", "far/nested apart", "by the client, or by Ray"),
    ("Ray stands, seconds x 1000", "up", "after the pool is open"),
)
"""Title, name of the samples, remark."""


def nested(target: Any, times: int) -> list[float]:
    """Make calls from inside a task, and return their durations in seconds."""
    took = []
    for _ in range(times):
        begin = time.perf_counter()
        sky.compute(workloads.noop)() >> target
        took.append(time.perf_counter() - begin)
    return took


def measure(pool: sky.ComputePool, relays: Sequence[Relay], found: Samples) -> None:
    """Measure one open pool: near first, then distant."""
    first, second = pool.node(0), pool.node(1)
    times_of = sky.compute(nested)
    for target in (first, second):  # warm: connections and functions are there
        times_of(target, 3) >> first
    _noops(pool, 50)
    _add(found, "noop", _noops(pool, CALLS))
    for relay in relays:
        relay.set_delay(RELAY_DELAY_S)
    try:
        _add(found, "far/noop", _noops(pool, DISTANT_CALLS))
        _add(found, "far/nested", times_of(first, NESTED_CALLS) >> first)
        _add(found, "far/nested apart", times_of(second, NESTED_CALLS) >> first)
    finally:
        for relay in relays:
            relay.set_delay(0.0)


def _add(found: Samples, name: str, values: list[float]) -> None:
    found.setdefault(name, []).extend(values)


def _wait_for_ray(told: queue.Queue[sky.events.Event]) -> float:
    """Wait until Ray stands, and return how long that took."""
    while True:
        match told.get(timeout=UP_LIMIT_S):
            case sky.events.EngineUp(seconds=seconds):
                return seconds
            case sky.events.EngineLost(reason=reason):
                raise RuntimeError(reason)


def _noops(pool: sky.ComputePool, count: int) -> list[float]:
    call, took = sky.compute(workloads.noop), []
    for _ in range(count):
        begin = time.perf_counter()
        call() >> pool
        took.append(time.perf_counter() - begin)
    return took


@contextlib.contextmanager
def rig() -> Iterator[tuple[sky.SSH, sky.Image, list[Relay]]]:
    """Make hosts, and a relay before each."""
    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(Bed.claim())
        hosts = [Host(bed, f"bench{number}", f"{bed.network}.{10 + number}") for number in range(HOSTS)]
        for host in hosts:
            stack.callback(host.destroy)
            host.start()
        relays = [stack.enter_context(Relay((host.wait_ssh().address, 22))) for host in hosts]
        names = [f"far{number}" for number in range(HOSTS)]
        config = bed.folder / "bench_config"
        blocks = [
            f"Host {name}\n HostName {relay.host}\n Port {relay.port}\n HostKeyAlias {host.name}\n"
            for name, relay, host in zip(names, relays, hosts, strict=True)
        ]
        config.write_text(f"{''.join(blocks)}Match all\n Include {bed.ssh_config}\n")
        index = stack.enter_context(contextlib.closing(PackageIndex(bed, with_ray=True)))
        image = sky.Image(pip_index_url=index.simple, includes=[str(Path(__file__).with_name("workloads.py"))])
        yield sky.SSH(hosts=names, config_file=str(config)), image, relays


def render(samples: dict[str, Samples]) -> str:
    lines = [f"{'ms':<40}{'':<8}{'median':>10}{'p10':>10}{'p90':>10}{'n':>6}"]
    for title, name, remark in ROWS:
        for engine, found in samples.items():
            if values := [value * 1e3 for value in found.get(name, [])]:
                numbers = (median(values), percentile(values, 0.1), percentile(values, 0.9))
                text = "".join(f"{number:>10.2f}" for number in numbers)
                lines.append(f"{title:<40}{engine:<8}{text}{len(values):>6}  {remark}")
    return "\n".join([*lines, "", "Targets", *_verdicts(samples)])


def _verdicts(samples: dict[str, Samples]) -> Iterator[str]:
    targets = (
        ("head", "far/nested", "under", 10.0),
        ("ray", "far/nested apart", "under", 10.0),
        ("direct", "far/nested", "over", 100.0),
        ("ray", "up", "under", 30_000.0),
    )
    titles = {name: title for title, name, _ in ROWS}
    for engine, name, sense, limit in targets:
        if values := samples[engine].get(name):
            took = median(values) * 1e3
            met = took < limit if sense == "under" else took > limit
            what = f"{titles[name]}, {engine}"
            yield f"  {'ok  ' if met else 'MISS'}  {what}: {took:.1f} ms, target {sense} {limit:g}"


def main(arguments: Sequence[str]) -> int:
    """Measure and print. Returns 1 if something went wrong. A missed target does not count as that."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all of them (default: 3)")
    rounds = parser.parse_args(arguments).rounds
    samples: dict[str, Samples] = {"head": {}, "direct": {}, "ray": {}}
    problems = []
    with rig() as (provider, image, relays):
        options: dict[str, Any] = {"nodes": HOSTS, "concurrency": 2, "image": image, "logs": False, "console": False}
        for turn in range(rounds):
            for engine, found in samples.items():
                print(f"round {turn + 1}/{rounds}: {engine}", file=sys.stderr, flush=True)
                pools = {"head": hosted_pool, "direct": sky.ComputePool, "ray": raised_pool}[engine]
                told: queue.Queue[sky.events.Event] = queue.Queue()
                try:
                    with pools(provider, **options, on_event=told.put) as pool:
                        if engine == "ray":
                            _add(found, "up", [_wait_for_ray(told)])
                        measure(pool, relays, found)
                except Exception as error:
                    problems.append(f"{engine}: {type(error).__name__}: {error}")
    facts = machine()
    print(f"{facts['cores']} cores of {facts['cpu']}, Linux {facts['kernel']}, Python {facts['python']}")
    print(f"{datetime.date.today().isoformat()}, {rounds} rounds; client and hosts share the cores\n")
    print(render(samples))
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
