"""Measure large values on hosts: over the client's uplink, and from node to node, beside Ray's own `get`.

    sudo .make/bench/bin/python benchmarks/cluster_values.py             # root on Linux; about 5 minutes

The pools and the hosts are those of `benchmarks/cluster.py`. The uplink is between the client's machine and the hosts,
in both directions. The output holds medians with the 10th and 90th percentile, and a verdict for each target.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shlex
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import workloads
from cluster import POOLS, Rig, rig
from dispatch import machine
from hosts import Findings, plain, ratio, table

import skyward as sky
from tests.hosts.bed import Bed
from tests.hosts.faults import ray_processes
from tests.hosts.host import Host
from tests.hosts.index import ray_wheels, wheels

SENT_BYTES = 100_000_000
KEPT_BYTES = 1_000_000_000
VALUES = 2
"""Values of each kind, for each pool of a round."""
_RAY = "/opt/ray"
_STORE_BYTES = 3 << 30
"""Object store of a Ray that moves the values itself. That of a pool's Ray has 256 MiB."""
_RAY_LIMIT_S = 120.0


def move_values(rig: Rig, name: str, found: Findings) -> None:
    """Send arrays to all nodes of a pool, and read arrays that one node keeps on the others."""
    make, read = sky.compute(workloads.make_array), sky.compute(workloads.touch)
    with rig.pool(name, rig.near) as (pool, _):
        read(make(size_bytes=8, seed=0) >> pool) @ pool  # from now on numpy is imported everywhere
        before_mib = ray_mib(rig.hosts)
        for seed in range(1, VALUES + 1):
            array = workloads.make_array(size_bytes=SENT_BYTES, seed=seed)
            with _measured(found, f"{name}/sent", rig.bed, SENT_BYTES):
                read(array) @ pool
            kept = make(size_bytes=KEPT_BYTES, seed=seed).keep() >> pool.node(0)
            for node in (1, 2):
                with _measured(found, f"{name}/{'kept' if node == 1 else 'kept again'}", rig.bed, KEPT_BYTES):
                    read(kept) >> pool.node(node)
            del array, kept
        found.add(f"{name}/memory", ray_mib(rig.hosts) - before_mib)


@contextlib.contextmanager
def _measured(found: Findings, name: str, bed: Bed, size: int) -> Iterator[None]:
    """Note the seconds, and how often the bytes crossed the uplink."""
    before, began = uplink_bytes(bed), time.perf_counter()
    yield
    took, crossed = time.perf_counter() - began, uplink_bytes(bed) - before
    found.add(name, took)
    found.add(f"{name}/uplink", crossed / size)
    print(f"{name}: {took:.2f} s, {crossed:,} bytes", file=sys.stderr, flush=True)


def uplink_bytes(bed: Bed) -> int:
    """Return the bytes between the client's machine and the hosts, in both directions."""
    counters = Path(f"/sys/class/net/{bed.name}/statistics")
    return sum(int((counters / name).read_text()) for name in ("rx_bytes", "tx_bytes"))


def ray_mib(hosts: Sequence[Host]) -> float:
    """Return the greatest memory of Ray's processes on one host, shared pages in their part."""
    return max(sum(map(_pss_mib, ray_processes(host))) for host in hosts)


def _pss_mib(process: int) -> float:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


# Ray itself -----------------------------------------------------------------------------------------------------------


def move_by_ray(rig: Rig, found: Findings) -> None:
    """Let Ray move the same values between two of the hosts, as it does by default: without encryption."""
    head, other = rig.hosts[:2]
    for host in (head, other):
        if not host.path(_RAY).exists():
            for wheel in (*wheels().glob("*.whl"), *ray_wheels().glob("*.whl")):
                zipfile.ZipFile(wheel).extractall(host.path(_RAY))
            host.run("chmod", "-R", "a+x", f"{_RAY}/ray/core/src")
            host.write(f"{_RAY}/moves.py", _MOVES)
    common = ("--disable-usage-stats", f"--object-store-memory={_STORE_BYTES}", "--num-cpus=1")
    address = f"{head.address}:6390"
    try:
        _ray(head, "start", "--head", "--port=6390", f"--node-ip-address={head.address}", *common)
        named = f"--resources={json.dumps({'other': 1})}"
        _ray(other, "start", f"--address={address}", f"--node-ip-address={other.address}", named, *common)
        program = ("env", f"PYTHONPATH={_RAY}", "python3", f"{_RAY}/moves.py", address, str(KEPT_BYTES), str(VALUES))
        done = head.run(*program, timeout_s=_RAY_LIMIT_S)
        took = json.loads(done.stdout.splitlines()[-1])
        print(f"ray.get: {took}", file=sys.stderr, flush=True)
        found.add("get", *took)
    finally:
        for host in (other, head):
            _ray(host, "stop", "--force")


def _ray(host: Host, *arguments: str) -> None:
    """Run a command of Ray, whose processes keep its output open."""
    command = shlex.join(["python3", "-m", "ray.scripts.scripts", *arguments])
    host.run("sh", "-c", f"PYTHONPATH={_RAY} {command} > /tmp/ray.log 2>&1", timeout_s=_RAY_LIMIT_S)


_MOVES = """
import json, sys, time
import numpy as np
import ray

address, size, count = sys.argv[1], *map(int, sys.argv[2:])
ray.init(address, logging_level="ERROR")

@ray.remote(num_cpus=0, resources={"other": 1})
class Reader:
    def read(self, refs):
        began = time.perf_counter()
        float(ray.get(refs[0])[::512].sum())
        return time.perf_counter() - began

reader = Reader.remote()
ray.get(reader.read.remote([ray.put(np.zeros(1))]))
took = []
for seed in range(count):
    ref = ray.put(np.arange(size // 8, dtype=np.float64) + seed)
    took.append(ray.get(reader.read.remote([ref])))
    del ref
print(json.dumps(took))
"""

# Report ---------------------------------------------------------------------------------------------------------------

ROWS = (
    ("100 MB to 3 nodes: on Ray", "ray/sent", "s"),
    ("... head", "head/sent", "s"),
    ("... direct", "direct/sent", "s"),
    ("1 GB kept on a node, read on another: on Ray", "ray/kept", "s"),
    ("... head", "head/kept", "s"),
    ("... direct", "direct/kept", "s"),
    ("... by Ray's own `get`", "get", "s"),
    ("... and on a third: on Ray", "ray/kept again", "s"),
)

TARGETS = (
    plain("100 MB to 3 nodes: times over the uplink", "ray/sent/uplink", "<=", 1.05),
    plain("1 GB kept, read elsewhere: share over the uplink", "ray/kept/uplink", "<=", 0.001),
    ratio("1 GB kept, read elsewhere: share of Ray's speed", "get", "ray/kept", ">=", 0.6),
    plain("memory of Ray afterwards beyond idle, MiB", "ray/memory", "<=", 300),
)


def main(arguments: Sequence[str]) -> int:
    """Measure and print. Returns 1 if something went wrong. A missed target does not count as that."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="rounds of all of them (default: 2)")
    parser.add_argument("--pools", nargs="+", default=list(POOLS), choices=list(POOLS), help="pools to measure")
    parsed = parser.parse_args(arguments)
    found = Findings()
    with rig() as bare:
        hosts = replace(bare, image=replace(bare.image, pip=["numpy"]))
        for _ in range(parsed.rounds):
            for name in parsed.pools:
                move_values(hosts, name, found)
            move_by_ray(hosts, found)
    facts = machine()
    print(f"{facts['cores']} cores of {facts['cpu']}, Linux {facts['kernel']}, Python {facts['python']}")
    print(f"{datetime.date.today().isoformat()}, {parsed.rounds} rounds; client and hosts share the cores\n")
    print(table(ROWS, TARGETS, found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
