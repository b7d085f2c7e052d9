"""Detached pools on rented machines: they go on without their client, and end by themselves in the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.cli import main
from skyward.errors import UsageError
from skyward.state import detached
from tests.hosts.bed import ROOT
from tests.hosts.ec2 import Ec2, Machine
from tests.hosts.faults import client_processes
from tests.hosts.index import PackageIndex
from tests.waiting import until, until_text

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

LEASE_S = 300.0
ENDING_S = 60.0
"""Seconds that a machine costs money after a request to end it, at most: `CloudProvider.ending_s`."""

PROGRAM = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
import skyward as sky

cidr, index, lease_s, said, *wanted = sys.argv[1:]

@sky.compute
def wait(path, value):
    import os, time
    while not os.path.exists(path):
        time.sleep(0.05)
    return value

def opened(options):
    name, for_s, budget_usd = options.split(",")
    pool = sky.ComputePool(
        sky.AWS(instance_types=["m5.large"], client_cidr=cidr, lease_s=float(lease_s)),
        name=name, allocation="on-demand", detached_for_s=float(for_s), budget_usd=float(budget_usd),
        image=sky.Image(pip_index_url=index), logs=False, console=False,
    ).start()
    return pool, wait("/tmp/go", name) > pool

with ThreadPoolExecutor() as threads:
    pools = list(threads.map(opened, wanted))
while not all(future.running() for _, future in pools):
    time.sleep(0.05)
with open(said + ".new", "w") as file:
    file.write(repr([pool.cost_usd for pool, _ in pools]))
os.rename(said + ".new", said)
time.sleep(600)
"""

Killed = Callable[..., list[float]]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def killed(ec2: Ec2, package_index: PackageIndex, runtime: Path, tmp_path: Path) -> Iterator[Killed]:
    """Return a function that opens detached pools in a program, kills it with its keeper, and returns their costs."""
    script, said, log = runtime / "client.py", tmp_path / "said", tmp_path / "log"
    script.write_text(PROGRAM)
    clients: list[subprocess.Popen[bytes]] = []

    def give(*wanted: str) -> list[float]:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, script, ec2.client_cidr, package_index.simple, str(LEASE_S), said, *wanted],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=runtime,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
        clients.append(process)
        until(lambda: said.exists() or process.poll() is not None, 150)
        assert said.exists(), log.read_text()
        process.kill()
        process.wait(60)
        until(lambda: client_processes(runtime)["keeper"] == [])
        costs: list[float] = [float(cost) for cost in until_text(said).strip("[]").split(",")]
        return costs

    try:
        yield give
    finally:
        for process in clients:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
        for pool in detached.detached_pools():
            if not pool.has_ended:
                main(["down", pool.pool, "--yes"])
        for pid in [pid for pids in client_processes(runtime).values() for pid in pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def machine_of(ec2: Ec2, name: str) -> Machine:
    (machine,) = (machine for machine in ec2.machines() if machine.tags["skyward:pool"].startswith(f"{name}-"))
    return machine


def running(ec2: Ec2) -> set[str]:
    return {machine.id for machine in ec2.machines("pending", "running")}


def test_pools_of_a_killed_client_go_on_until_they_are_closed_or_taken_down(
    ec2: Ec2, killed: Killed, capsys: pytest.CaptureFixture[str]
) -> None:
    cost, _ = killed("train,600,50", "other,600,50")
    train, other = machine_of(ec2, "train"), machine_of(ec2, "other")
    host = ec2.host(train.id)
    assert "AWS_" not in host.run("sh", "-c", "cat /proc/[0-9]*/environ", check=False).stdout, "no credentials there"

    capsys.readouterr()
    assert main(["ls"]) == 0
    listed = capsys.readouterr().out
    assert listed.count("detached") == 2
    assert train.id in listed
    assert main(["gc", "--dry-run"]) == 0
    assert "end machine" not in capsys.readouterr().out
    assert main(["gc"]) == 0
    assert running(ec2) == {train.id, other.id}
    capsys.readouterr()
    assert main(["ps", "train"]) == 0
    assert "running" in capsys.readouterr().out

    host.write("/tmp/go", "")
    pool = sky.ComputePool.attach("train", logs=False, console=False)
    (call,) = pool.calls()
    assert pool.future(call).result(60) == "train"
    assert pool.cost_usd >= cost > 0, "it counts from the first client on"
    cost = pool.cost_usd
    pool.detach()
    assert pool.cost_usd >= cost
    with sky.ComputePool.attach("train", logs=False, console=False) as pool:
        assert pool.cost_usd >= cost
        assert sky.compute(abs)(-5) >> pool == 5
        assert running(ec2) == {train.id, other.id}
    assert running(ec2) == {other.id}
    with pytest.raises(UsageError, match="ended on .*, because its program closed it"):
        sky.ComputePool.attach("train")

    assert main(["down", "other", "--yes"]) == 0
    assert ec2.left() == []
    capsys.readouterr()
    assert main(["ps", "other"]) == 1
    assert "because of `skyward down`" in capsys.readouterr().err


def test_a_pool_that_nobody_attaches_to_terminates_its_machine_when_time_or_money_is_over(
    ec2: Ec2, killed: Killed, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = sky.AWS(instance_types=["m5.large"], client_cidr=ec2.client_cidr)
    price = sky.ComputePool(provider, allocation="on-demand").offers()[0].price_usd_per_hour
    # After 20 s the rest pays for the end alone. A client that is there goes on for about `LEASE_S` more.
    killed("short,2,50", f"poor,3600,{price * (20 + LEASE_S + ENDING_S) / 3600}")
    assert len(ec2.machines()) == 2
    until(lambda: running(ec2) == set(), LEASE_S / 2)  # the machines do not wait for their lease
    until(lambda: all(machine.state == "terminated" for machine in ec2.machines()))
    capsys.readouterr()
    assert main(["ls"]) == 0
    assert capsys.readouterr().out.count(" dead ") == 2
    assert main(["gc"]) == 0
    assert ec2.left() == []
    with pytest.raises(
        UsageError, match=r"ended on .* is gone \(.*\), as when no client came for 2\.0 s, or its budget"
    ):
        sky.ComputePool.attach("short")
    with pytest.raises(
        UsageError, match=r"as when no client came for 1 h.*, or its budget lasts no longer; open a new"
    ):
        sky.ComputePool.attach("poor")
