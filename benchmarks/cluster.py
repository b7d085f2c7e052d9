"""Measure a pool whose scheduler runs beside its first node: beside one on `direct`, and beside Ray and Dask.

    sudo .make/bench/bin/python benchmarks/cluster.py             # root on Linux; about 15 minutes
    sudo .make/bench/bin/python benchmarks/cluster.py --only calls,peers --rounds 1

All pools use the same 3 hosts of the test bed (tests/hosts/README.md), one after the other in each round. A relay
before each host makes the client distant where that is measured. Client and hosts share this machine's cores. The
output holds medians with the 10th and 90th percentile, and a verdict for each target.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import processes
import workloads
from dispatch import machine
from hosts import Findings, Target, beyond, plain, ratio, table
from hosts_peers import dask, echo_round_trips, ray, tunnel

import skyward as sky
from tests.engines import hosted_pool, raised_pool
from tests.hosts.bed import Bed
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.relay import Relay
from tests.waiting import until

HOSTS = 3
RELAY_DELAY_S = 0.05
"""Each way."""
CALLS = 500
PEER_CALLS = 100
DISTANT_CALLS = 20
NESTED_CALLS = 20
AT_ONCE = 4_000
MAP_ITEMS = 100_000
SLEEPS, SLEEP_S = 1_000, 0.05
"""Calls of the map in which a node is lost, and how long each sleeps."""
UP_LIMIT_S = 120.0
SETTLE_S, IDLE_S = 40.0, 30.0
"""Pause after the last call, and the time in which a pool without calls is watched. Ray and the pool are busy with
their start for half a minute.
"""
OF_RAY = "engine.ray", "/ray/", "ray::"
"""Parts of the commands of Ray's processes, its driver and its bridges."""

POOLS: dict[str, Callable[..., sky.ComputePool]] = {
    "head": hosted_pool,
    "direct": functools.partial(sky.ComputePool, engine="direct"),
    "ray": raised_pool,
}


@dataclass(frozen=True, kw_only=True)
class Rig:
    """Hosts, a relay before each, and what opens pools on them."""

    bed: Bed
    hosts: list[Host]
    relays: list[Relay]
    near: sky.SSH
    far: sky.SSH
    """The same hosts through the relays."""
    image: sky.Image

    @contextlib.contextmanager
    def pool(self, name: str, provider: sky.SSH, nodes: int = HOSTS) -> Iterator[tuple[sky.ComputePool, float]]:
        """Open a pool of `POOLS`. On Ray, wait until it stands.

        Yields:
            The pool, and the seconds that Ray took to stand.
        """
        told: queue.Queue[sky.events.Event] = queue.Queue()
        with POOLS[name](
            provider,
            nodes=nodes,
            concurrency=2,
            image=self.image,
            logs=False,
            console=False,
            on_event=told.put,
        ) as pool:
            yield pool, _wait_for_ray(told) if name == "ray" else 0.0


def _wait_for_ray(told: queue.Queue[sky.events.Event]) -> float:
    """Wait until Ray stands, and return how long that took."""
    while True:
        match told.get(timeout=UP_LIMIT_S):
            case sky.events.EngineUp(seconds=seconds):
                return seconds
            case sky.events.EngineLost(reason=reason):
                raise RuntimeError(reason)


# Measures -------------------------------------------------------------------------------------------------------------


def calls(rig: Rig, found: Findings) -> None:
    """Make small calls on each pool: one after the other, many at once, and a map."""
    noop = sky.compute(workloads.noop)
    for name in POOLS:
        with rig.pool(name, rig.near) as (pool, up_s):
            if name == "ray":
                found.add("up", up_s)
            _noops(pool, 50)
            found.add(f"{name}/noop", *_noops(pool, CALLS))
            for is_warm in (False, True):
                begin = time.perf_counter()
                for future in [noop() > pool for _ in range(AT_ONCE)]:
                    future.result()
                at_once = AT_ONCE / (time.perf_counter() - begin)
                begin = time.perf_counter()
                values = pool.map(workloads.tiny, range(MAP_ITEMS))
                mapped = MAP_ITEMS / (time.perf_counter() - begin)
                assert values == [workloads.tiny(item) for item in range(MAP_ITEMS)], f"{name}: wrong values"
                if is_warm:
                    found.add(f"{name}/at once", at_once)
                    found.add(f"{name}/map", mapped)


def distant(rig: Rig, found: Findings) -> None:
    """Make calls on pools whose client is 100 ms away, and calls from inside a task."""
    times_of = sky.compute(_nested)
    for name in POOLS:
        with rig.pool(name, rig.far) as (pool, _):
            first, second = pool.node(0), pool.node(1)
            for target in (first, second):  # warm: connections and functions are there
                times_of(target, 3) >> first
            _noops(pool, 20)
            for relay in rig.relays:
                relay.set_delay(RELAY_DELAY_S)
            try:
                found.add(f"{name}/far noop", *_noops(pool, DISTANT_CALLS))
                found.add(f"{name}/nested", *(times_of(first, NESTED_CALLS) >> first))
                found.add(f"{name}/nested apart", *(times_of(second, NESTED_CALLS) >> first))
            finally:
                for relay in rig.relays:
                    relay.set_delay(0.0)


def _nested(target: Any, times: int) -> list[float]:
    """Make calls from inside a task, and return their durations in seconds."""
    took = []
    for _ in range(times):
        begin = time.perf_counter()
        sky.compute(workloads.noop)() >> target
        took.append(time.perf_counter() - begin)
    return took


def _noops(pool: sky.ComputePool, count: int) -> list[float]:
    call, took = sky.compute(workloads.noop), []
    for _ in range(count):
        begin = time.perf_counter()
        call() >> pool
        took.append(time.perf_counter() - begin)
    return took


def peers(rig: Rig, found: Findings) -> None:
    """Make the same calls by Ray Client and a Dask Client through one ssh tunnel, and to an actor on the host."""
    host = rig.hosts[0]
    found.add("echo", *echo_round_trips(rig.bed, host.name, count=300))
    with tunnel(rig.bed, host) as ports:
        with ray(ports["ray"]) as caller:
            one_by_one, at_once = caller.call(workloads.ray_actor_calls, CALLS, AT_ONCE)
            found.add("actor/noop", *one_by_one)
            found.add("actor/at once", AT_ONCE / at_once)
            _peer("ray client", caller, found)
        with dask(ports["dask"]) as caller:
            _peer("dask client", caller, found)


def _peer(name: str, caller: Any, found: Findings) -> None:
    for _ in range(20):
        caller.call(workloads.noop)
    for _ in range(PEER_CALLS):
        begin = time.perf_counter()
        caller.call(workloads.noop)
        found.add(f"{name}/noop", time.perf_counter() - begin)
    for is_warm in (False, True):
        begin = time.perf_counter()
        caller.futures(workloads.noop, AT_ONCE)
        if is_warm:
            found.add(f"{name}/at once", AT_ONCE / (time.perf_counter() - begin))


def start(rig: Rig, found: Findings) -> None:
    """Time the first result of pools on hosts that are ready."""
    engines: tuple[Literal["direct", "auto"], ...] = ("direct", "auto", "direct", "auto")
    for name in engines:
        begin = time.perf_counter()
        with sky.ComputePool(rig.near, nodes=HOSTS, engine=name, image=rig.image, logs=False, console=False) as pool:
            sky.compute(workloads.noop)() >> pool
            found.add(f"{name}/first", time.perf_counter() - begin)


def attach(rig: Rig, found: Findings) -> None:
    """Leave a detached pool on Ray, and time an attach to the first answer."""
    name = f"bench-{time.time_ns()}"
    told: queue.Queue[sky.events.Event] = queue.Queue()
    pool = sky.ComputePool(
        rig.near,
        nodes=HOSTS,
        engine="ray",
        name=name,
        detached_for_s=600,
        concurrency=2,
        image=rig.image,
        logs=False,
        console=False,
        on_event=told.put,
    ).start()
    _wait_for_ray(told)
    pool.detach()
    for _ in range(3):
        begin = time.perf_counter()
        pool = sky.ComputePool.attach(name, logs=False, console=False)
        sky.compute(workloads.noop)() >> pool
        found.add("attach", time.perf_counter() - begin)
        pool.detach()
    with sky.ComputePool.attach(name, logs=False, console=False):
        pass  # which ends it


def loss(rig: Rig, found: Findings) -> None:
    """Map over a pool on Ray one of whose nodes is killed after a third of it, and over a pool without that node.

    The machine still answers, and says that the node is gone. A machine that says nothing is lost when its lease is
    over, because its calls may still run.
    """
    with rig.pool("ray", rig.near, HOSTS - 1) as (pool, _):
        found.add("loss/without", _sleep_all(pool))
    with rig.pool("ray", rig.near) as (pool, _):
        fault = threading.Timer(SLEEPS * SLEEP_S / (2 * HOSTS) / 3, _kill_all, [rig.hosts[-1]])
        fault.start()
        found.add("loss/with", _sleep_all(pool))
        fault.join()


def _kill_all(host: Host) -> None:
    for process in host.started_processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.outside_pid, signal.SIGKILL)


def _sleep_all(pool: sky.ComputePool) -> float:
    begin = time.perf_counter()
    sleep = sky.compute(time.sleep, retries=2)
    for future in [sleep(SLEEP_S) > pool for _ in range(SLEEPS)]:
        future.result()
    return time.perf_counter() - begin


def idle(rig: Rig, found: Findings) -> None:
    """Watch the processes of a pool on Ray that has nothing to do: their processor time, and their memory then.

    Nobody listens to its events, as in most programs: nodes would report their load every two seconds.
    """
    options = {"concurrency": 2, "image": rig.image, "logs": False, "console": False}
    with raised_pool(rig.near, nodes=HOSTS, **options) as pool:
        until(lambda: pool.engine == "ray", UP_LIMIT_S)
        sky.compute(workloads.noop)() >> pool
        time.sleep(SETTLE_S)
        client = [os.getpid(), *processes.descendants(os.getpid())]
        started = [host.started_processes() for host in rig.hosts]
        of_hosts = {pid for host in rig.hosts for pid in [process.outside_pid for process in host.processes()]}
        groups = {"client": [pid for pid in client if pid not in of_hosts]}
        for name, there in zip(("head", "node", "node"), started, strict=True):
            of_ray = [each.outside_pid for each in there if any(part in each.command for part in OF_RAY)]
            groups.setdefault(f"{name} ray", []).extend(of_ray)
            groups.setdefault(f"{name} ours", []).extend({each.outside_pid for each in there} - set(of_ray))
        before = {name: sum(map(processes.all_cpu_seconds, pids)) for name, pids in groups.items()}
        time.sleep(IDLE_S)
        for name, pids in groups.items():
            nodes = HOSTS - 1 if name.startswith("node") else 1
            spent = sum(map(processes.all_cpu_seconds, pids)) - before[name]
            found.add(f"idle {name}/cpu", spent / IDLE_S / nodes * 100)
            found.add(f"idle {name}/memory", processes.pss_mib(pids) / nodes)


MEASURES = {measure.__name__: measure for measure in (calls, distant, peers, start, attach, loss, idle)}

# Report -------------------------------------------------------------------------------------------------------------

ROWS = (
    ("100 bytes there and back, `ssh host cat`", "echo", "ms"),
    ("One no-op call: head", "head/noop", "ms"),
    ("... head, and Ray between the nodes", "ray/noop", "ms"),
    ("... direct", "direct/noop", "ms"),
    ("... an actor of Ray, called on the host", "actor/noop", "ms"),
    ("... Ray Client through an ssh tunnel", "ray client/noop", "ms"),
    ("... Dask Client through an ssh tunnel", "dask client/noop", "ms"),
    (f"{AT_ONCE:,} no-ops at once: head", "head/at once", "calls/s"),
    ("... head, and Ray between the nodes", "ray/at once", "calls/s"),
    ("... direct", "direct/at once", "calls/s"),
    ("... an actor of Ray, called on the host", "actor/at once", "calls/s"),
    ("... Ray Client", "ray client/at once", "calls/s"),
    ("... Dask Client", "dask client/at once", "calls/s"),
    (f"Map of {MAP_ITEMS:,} tiny calls: head", "head/map", "calls/s"),
    ("... head, and Ray between the nodes", "ray/map", "calls/s"),
    ("... direct", "direct/map", "calls/s"),
    ("No-op, client 100 ms away: head", "head/far noop", "ms"),
    ("... head, and Ray between the nodes", "ray/far noop", "ms"),
    ("... direct", "direct/far noop", "ms"),
    ("Call in a task, on its node: head", "head/nested", "ms"),
    ("... head, and Ray between the nodes", "ray/nested", "ms"),
    ("... direct", "direct/nested", "ms"),
    ("Call in a task, on another node: head", "head/nested apart", "ms"),
    ("... head, and Ray between the nodes", "ray/nested apart", "ms"),
    ("... direct", "direct/nested apart", "ms"),
    ("Ray stands, after the pool is open", "up", "s"),
    ("Pool on ready hosts to first result: auto", "auto/first", "s"),
    ("... direct", "direct/first", "s"),
    ("`attach` to the first answer", "attach", "s"),
    (f"{SLEEPS:,} calls of {SLEEP_S * 1e3:.0f} ms, a node lost", "loss/with", "s"),
    ("... on the nodes that are left", "loss/without", "s"),
    ("Idle, of a core: the client with its keeper", "idle client/cpu", "%"),
    ("... Ray and its driver on the head", "idle head ray/cpu", "%"),
    ("... head, agent and slots there", "idle head ours/cpu", "%"),
    ("... Ray and its bridge on another node", "idle node ray/cpu", "%"),
    ("... agent and slots there", "idle node ours/cpu", "%"),
    ("Idle, PSS: the client with its keeper", "idle client/memory", "MiB"),
    ("... Ray and its driver on the head", "idle head ray/memory", "MiB"),
    ("... head, agent and slots there", "idle head ours/memory", "MiB"),
    ("... Ray and its bridge on another node", "idle node ray/memory", "MiB"),
    ("... agent and slots there", "idle node ours/memory", "MiB"),
)
"""Title, name of the samples, unit. Samples are seconds, or calls per second."""

# Source: the issue that asked for them.
TARGETS = (
    Target(
        "no-op beyond the round trip, times an actor call on the host",
        ("ray/noop", "echo", "actor/noop"),
        lambda noop, echo, actor: (noop - echo) / actor,
        "<=",
        2.5,
    ),
    ratio("no-op, share of Ray Client's", "ray/noop", "ray client/noop", "<=", 0.5),
    ratio("no-op, share of a Dask Client's", "ray/noop", "dask client/noop", "<=", 0.5),
    ratio("calls at once, times Ray Client's", "ray/at once", "ray client/at once", ">=", 3),
    ratio("calls at once, times a Dask Client's", "ray/at once", "dask client/at once", ">=", 3),
    ratio("calls at once, times an actor's on the host", "ray/at once", "actor/at once", ">=", 2),
    ratio("map of tiny calls, share of direct's", "ray/map", "direct/map", ">=", 0.5),
    plain("call in a task on its node, head, s", "head/nested", "<=", 0.01),
    plain("call in a task on another node, Ray, s", "ray/nested apart", "<=", 0.01),
    plain("call in a task, direct, s", "direct/nested", ">=", 0.1),
    plain("Ray stands, s", "up", "<=", 30),
    ratio("first result, times direct's", "auto/first", "direct/first", "<=", 1.2),
    plain("attach to the first answer, s", "attach", "<=", 2),
    Target(
        "idle, head with Ray and driver, % of a core",
        ("idle head ray/cpu", "idle head ours/cpu"),
        lambda of_ray, ours: of_ray + ours,
        "<=",
        4,
    ),
    plain("idle, Ray with its bridge on a node, % of a core", "idle node ray/cpu", "<=", 4),
    Target(
        "idle, head with Ray and driver, MiB",
        ("idle head ray/memory", "idle head ours/memory"),
        lambda of_ray, ours: of_ray + ours,
        "<=",
        400,
    ),
    plain("idle, Ray with its bridge on a node, MiB", "idle node ray/memory", "<=", 200),
    beyond("a node lost in a map, ms beyond the nodes left", "loss/with", "loss/without", "<=", 10_000),
)


@contextlib.contextmanager
def rig() -> Iterator[Rig]:
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
        near = sky.SSH(hosts=[host.name for host in hosts], config_file=str(config))
        far = sky.SSH(hosts=names, config_file=str(config))
        yield Rig(bed=bed, hosts=hosts, relays=relays, near=near, far=far, image=image)


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
        for turn in range(parsed.rounds):
            for name in only:
                print(f"round {turn + 1}/{parsed.rounds}: {name}", file=sys.stderr, flush=True)
                try:
                    MEASURES[name](hosts, found)
                except Exception as error:
                    found.problems.append(f"{name}: {type(error).__name__}: {error}")
    facts = machine()
    print(f"{facts['cores']} cores of {facts['cpu']}, Linux {facts['kernel']}, Python {facts['python']}")
    print(f"{datetime.date.today().isoformat()}, {parsed.rounds} rounds; client and hosts share the cores\n")
    print(table(ROWS, TARGETS, found))
    for problem in found.problems:
        print(f"  {problem}")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
