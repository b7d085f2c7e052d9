"""Compare skyward over SSH on bare hosts with Ray Client and a Dask Client: `python benchmarks/hosts.py`.

Ray and Dask share one SSH tunnel. The benchmark needs root on Linux, because the hosts are containers of the test bed
(tests/hosts/README.md), each with its own sshd, disk and network. Client and hosts share this machine's cores. The
output holds medians with the 10th and 90th percentile, ratios taken in one run, and a verdict for each target.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import operator
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import workloads
from dispatch import machine
from hosts_peers import Caller, dask, echo_round_trips, ray, skyward, tunnel, upload_seconds
from report import percentile

from tests.hosts.bed import Bed
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.relay import Relay

MIB = 2**20
ARRAY_BYTES = 100_000_000
MAP_ITEMS = 20_000
PIPELINED = 4_000
RELAY_DELAY_S = 0.05
"""Each way."""


@dataclass(kw_only=True)
class Findings:
    """Samples of all rounds, by name."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, *values: float) -> None:
        self.samples.setdefault(name, []).extend(values)

    def median(self, name: str) -> float | None:
        values = self.samples.get(name)
        return median(values) if values else None


@dataclass(frozen=True, kw_only=True)
class Rig:
    """Hosts that a measure uses: `near` is a warm host, `far` is the same host through a relay."""

    bed: Bed
    near: Host
    far: str
    relay: Relay
    image: Any
    new_host: Callable[[], Host]


# Measures -------------------------------------------------------------------------------------------------------------


def calls(rig: Rig, found: Findings) -> None:
    """Make one small call after the other, many at once, and a map. The peers use the same host one after the other."""
    found.add("echo", *echo_round_trips(rig.bed, rig.near.name, count=300))
    with skyward(rig.bed, rig.near.name, rig.image) as caller:
        _calls("skyward", caller, found, count=1000)
    with tunnel(rig.bed, rig.near) as ports:
        with ray(ports["ray"]) as caller:
            _calls("ray", caller, found, count=100)
        with dask(ports["dask"]) as caller:
            _calls("dask", caller, found, count=100)


def paramiko(rig: Rig, found: Findings) -> None:
    """Make the same calls by paramiko, for machines without an OpenSSH client."""
    with skyward(rig.bed, rig.near.name, rig.image, transport="paramiko") as caller:
        _calls("paramiko", caller, found, count=300)


def _calls(name: str, caller: Caller, found: Findings, *, count: int) -> None:
    for _ in range(20):
        caller.call(workloads.noop)
    for _ in range(count):
        begin = time.perf_counter()
        caller.call(workloads.noop)
        found.add(f"{name}/noop", time.perf_counter() - begin)
    _rates(name, caller, found)


def _rates(name: str, caller: Caller, found: Findings) -> None:
    # The peers are slow, and fewer calls say the same. The round trip through the relay must be a small part of the
    # whole: this map takes two seconds.
    relayed, slow = (4 * PIPELINED, 1024 * MAP_ITEMS), (PIPELINED // 4, MAP_ITEMS // 64)
    rows = {"near": relayed, "relayed": relayed, "far": relayed, "ray": slow, "dask": slow}
    count, map_count = rows.get(name, (PIPELINED, MAP_ITEMS))
    items = range(map_count)
    for is_warm in (False, True):
        begin = time.perf_counter()
        caller.futures(workloads.noop, count)
        pipelined = count / (time.perf_counter() - begin)
        begin = time.perf_counter()
        values = caller.map(workloads.tiny, items)
        mapped = len(items) / (time.perf_counter() - begin)
        assert len(values) == len(items), f"{name}: {len(values)} values of {len(items)}"
        assert all(map(operator.eq, values, map(workloads.tiny, items))), f"{name}: wrong values"
        if is_warm:
            found.add(f"{name}/pipelined", pipelined)
            found.add(f"{name}/map", mapped)


def relay(rig: Rig, found: Findings) -> None:
    """Make many calls at once: without a relay, with one, and with one that adds `RELAY_DELAY_S` in each direction.

    The relay is a Python process on the same cores. The relay without delay shows what the process itself costs.
    """
    for name, host, delay_s in (
        ("near", rig.near.name, 0.0),
        ("relayed", rig.far, 0.0),
        ("far", rig.far, RELAY_DELAY_S),
    ):
        rig.relay.set_delay(delay_s)
        with skyward(rig.bed, host, rig.image) as caller:
            caller.futures(workloads.noop, 500)
            _rates(name, caller, found)
            if delay_s:
                _far_array(rig, caller, found)


def _far_array(rig: Rig, caller: Caller, found: Findings) -> None:
    """Send 100 MB through the relay, by ssh alone and as an argument. An ssh channel has at most 2 MiB in flight."""
    array = workloads.make_array(size_bytes=ARRAY_BYTES, seed=int(time.time()))
    found.add("far/upload", upload_seconds(rig.bed, rig.far, memoryview(array).cast("B")))
    begin = time.perf_counter()
    assert caller.call(workloads.touch, array) == workloads.touch(array), "the array changed on its way"
    found.add("far/array", time.perf_counter() - begin)


def arrays(rig: Rig, found: Findings) -> None:
    """Send 100 MB to the host: by ssh alone, as an argument, and as the same argument again."""
    with skyward(rig.bed, rig.near.name, rig.image) as caller:
        caller.call(workloads.touch, workloads.make_array(size_bytes=MIB, seed=0))
        for seed in range(3):
            array = workloads.make_array(size_bytes=ARRAY_BYTES, seed=seed + int(time.time()))
            found.add("ssh/upload", upload_seconds(rig.bed, rig.near.name, memoryview(array).cast("B")))
            for name in ("first", "again"):
                begin = time.perf_counter()
                assert caller.call(workloads.touch, array) == workloads.touch(array), "the array changed on its way"
                found.add(f"array/{name}", time.perf_counter() - begin)


def start(rig: Rig, found: Findings) -> None:
    """Time the first result: on a bare host, counted from when its ssh answers, and on the same host again."""
    host = rig.new_host()
    for name in ("bare", "ready", "ready"):
        begin = time.perf_counter()
        with skyward(rig.bed, host.name, rig.image) as caller:
            caller.call(workloads.noop)
            found.add(f"start/{name}", time.perf_counter() - begin)
    if left := host.started_processes():
        found.problems.append(f"left running on a host: {', '.join(process.command for process in left)}")
    host.destroy()


MEASURES = {measure.__name__: measure for measure in (start, calls, paramiko, relay, arrays)}

# Report -------------------------------------------------------------------------------------------------------------


ROWS = (
    ("100 bytes there and back, `ssh host cat`", "echo", "ms"),
    ("One no-op call: skyward", "skyward/noop", "ms"),
    ("... skyward by paramiko", "paramiko/noop", "ms"),
    ("... Ray Client, same host, through an ssh tunnel", "ray/noop", "ms"),
    ("... Dask Client, same host, through an ssh tunnel", "dask/noop", "ms"),
    (f"{PIPELINED:,} no-ops at once: skyward", "skyward/pipelined", "calls/s"),
    ("... skyward by paramiko", "paramiko/pipelined", "calls/s"),
    ("... Ray Client", "ray/pipelined", "calls/s"),
    ("... Dask Client", "dask/pipelined", "calls/s"),
    (f"Map of {MAP_ITEMS:,} tiny calls: skyward", "skyward/map", "calls/s"),
    ("... Ray Client, grouped by hand", "ray/map", "calls/s"),
    ("... Dask Client, batch_size by hand", "dask/map", "calls/s"),
    ("No-ops at once, no relay in between", "near/pipelined", "calls/s"),
    ("... a relay without delay", "relayed/pipelined", "calls/s"),
    (f"... a relay of {RELAY_DELAY_S * 1e3:.0f} ms each way", "far/pipelined", "calls/s"),
    ("Map, no relay in between", "near/map", "calls/s"),
    ("... a relay without delay", "relayed/map", "calls/s"),
    (f"... a relay of {RELAY_DELAY_S * 1e3:.0f} ms each way", "far/map", "calls/s"),
    ("100 MB through that relay by ssh alone", "far/upload", "ms"),
    ("... as an argument", "far/array", "ms"),
    ("100 MB by `ssh host 'cat > /dev/shm/x'`", "ssh/upload", "ms"),
    ("100 MB as an argument, first time", "array/first", "ms"),
    ("... again", "array/again", "ms"),
    ("Bare host, ssh answers, to first result", "start/bare", "s"),
    ("Pool on a host that is ready, to first result", "start/ready", "s"),
)
"""Title, name of the samples, unit. Samples are seconds, or calls per second."""


@dataclass(frozen=True)
class Target:
    """Target for `value` of the medians of `names`: at most `limit`, or at least `limit`."""

    text: str
    names: tuple[str, ...]
    value: Callable[..., float]
    sense: str
    limit: float

    def verdict(self, found: Findings) -> str:
        medians = [found.median(name) for name in self.names]
        if None in medians:
            return f"  n/a   {self.text}"
        value = self.value(*medians)
        met = value >= self.limit if self.sense == ">=" else value <= self.limit
        return f"  {'ok  ' if met else 'MISS'}  {self.text:<62}{value:>10,.3f}, target {self.sense} {self.limit:g}"


def beyond(text: str, name: str, other: str, sense: str, limit: float) -> Target:
    """Convert to milliseconds."""
    return Target(text, (name, other), lambda a, b: (a - b) * 1e3, sense, limit)


def ratio(text: str, name: str, other: str, sense: str, limit: float) -> Target:
    return Target(text, (name, other), operator.truediv, sense, limit)


def plain(text: str, name: str, sense: str, limit: float) -> Target:
    return Target(text, (name,), lambda a: a, sense, limit)


# Source: the issue that asked for them.
TARGETS = (
    beyond("no-op beyond the round trip, ms", "skyward/noop", "echo", "<=", 2),
    ratio("no-op, ratio to Ray Client", "skyward/noop", "ray/noop", "<=", 1),
    ratio("no-op, ratio to Dask Client", "skyward/noop", "dask/noop", "<=", 1),
    plain("small calls per second", "skyward/pipelined", ">=", 2000),
    ratio("map of tiny calls, times Ray Client's small calls", "skyward/map", "ray/pipelined", ">=", 5),
    ratio("map of tiny calls, times Dask Client's small calls", "skyward/map", "dask/pipelined", ">=", 5),
    ratio("map of tiny calls, times Ray Client's, grouped by hand", "skyward/map", "ray/map", ">=", 5),
    ratio("map of tiny calls, times Dask Client's, batched by hand", "skyward/map", "dask/map", ">=", 5),
    ratio("small calls with the relay, share of those without", "far/pipelined", "near/pipelined", ">=", 0.8),
    ratio(
        "small calls with its delay, share of those through it without", "far/pipelined", "relayed/pipelined", ">=", 0.8
    ),
    ratio("map with its delay, share of that through it without", "far/map", "relayed/map", ">=", 0.8),
    ratio("map with the relay, share of that without", "far/map", "near/map", ">=", 0.8),
    ratio("100 MB argument, speed as a share of ssh's own", "ssh/upload", "array/first", ">=", 0.8),
    ratio("... with the relay's delay", "far/upload", "far/array", ">=", 0.8),
    beyond("100 MB again, ms beyond a round trip", "array/again", "echo", "<=", 20),
    plain("bare host to first result, s", "start/bare", "<=", 15),
    plain("ready host to first result, s", "start/ready", "<=", 3),
)


def table(rows: Iterable[tuple[str, str, str]], targets: Iterable[Target], found: Findings) -> str:
    """Return the rows that have samples, and a verdict for each target. `rows`: see `ROWS`."""
    lines = [f"{'':<60}{'median':>10}{'p10':>10}{'p90':>10}{'n':>6}"]
    for title, name, unit in rows:
        scale = 1e3 if unit == "ms" else 1.0
        if values := [value * scale for value in found.samples.get(name, [])]:
            numbers = (median(values), percentile(values, 0.1), percentile(values, 0.9))
            text = "".join(f"{number:>10,.0f}" if number >= 1000 else f"{number:>10.3f}" for number in numbers)
            lines.append(f"{f'{title}, {unit}':<60}{text}{len(values):>6}")
    return "\n".join([*lines, "", "Targets", *(target.verdict(found) for target in targets)])


@contextlib.contextmanager
def rig() -> Iterator[Rig]:
    """Make one warm host, a relay to it, and the requested number of bare hosts."""
    import skyward as sky

    with contextlib.ExitStack() as stack:
        bed = stack.enter_context(Bed.claim())
        addresses = (f"{bed.network}.{last}" for last in range(10, 250))
        names = (f"bench{number}" for number in range(1000))
        made: list[Host] = []
        stack.callback(lambda: [host.destroy() for host in made])

        def new_host() -> Host:
            host = Host(bed, next(names), next(addresses))
            made.append(host)
            return host.start().wait_ssh()

        near = new_host()
        index = stack.enter_context(contextlib.closing(PackageIndex(bed)))
        image = sky.Image(
            pip=["numpy"],
            pip_index_url=index.simple,
            includes=[str(Path(__file__).with_name("workloads.py"))],
        )
        slow = stack.enter_context(Relay((near.address, 22), delay_s=RELAY_DELAY_S))
        far = f"Host far\n HostName {slow.host}\n Port {slow.port}\n HostKeyAlias {near.name}\n"
        (bed.folder / "bench_config").write_text(f"{far}Match all\n Include {bed.ssh_config}\n")
        yield Rig(bed=bed, near=near, far="far", relay=slow, image=image, new_host=new_host)


def main(arguments: Sequence[str]) -> int:
    """Measure and print. Returns 1 if something went wrong. A missed target does not count as that."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(MEASURES), help=f"comma-separated, of: {', '.join(MEASURES)}")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all of them (default: 3)")
    parsed = parser.parse_args(arguments)
    only = parsed.only.split(",")
    if unknown := set(only) - set(MEASURES):
        parser.error(f"--only: {', '.join(sorted(unknown))}: not one of {', '.join(MEASURES)}")
    found = Findings()
    with rig() as hosts:
        try:
            for turn in range(parsed.rounds):
                for name in only:
                    print(f"round {turn + 1}/{parsed.rounds}: {name}", file=sys.stderr, flush=True)
                    try:
                        MEASURES[name](hosts, found)
                    except Exception as error:
                        found.problems.append(f"{name}: {type(error).__name__}: {error}")
        except KeyboardInterrupt:
            found.problems.append("interrupted: the rounds that were not complete are missing")
    facts = machine()
    print(f"{facts['cores']} cores of {facts['cpu']}, Linux {facts['kernel']}, Python {facts['python']}")
    print(f"{datetime.date.today().isoformat()}, {parsed.rounds} rounds; client and hosts share the cores\n")
    print(table(ROWS, TARGETS, found))
    for problem in found.problems:
        print(f"  {problem}")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
