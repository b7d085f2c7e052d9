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
from skyward.errors import NodeLost, UsageError
from skyward.state import detached
from skyward.state.journal import journals
from tests.hosts.bed import ROOT
from tests.hosts.ec2 import Ec2, Machine
from tests.hosts.faults import client_processes, kill
from tests.hosts.index import PackageIndex
from tests.waiting import until, until_text

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]

LEASE_S = 300.0
ENDING_S = 60.0
"""Seconds that a machine costs money after a request to end it, at most: `CloudProvider.ending_s`."""

ALONE_S = 60.0
"""Seconds for which a poor pool can pay: longer than Ray takes beside it."""
REPLACED_S = 120.0
"""Until a machine has taken the place of another, on a loaded one."""

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
    name, for_s, budget_usd, nodes = options.split(",")
    least, _, most = nodes.partition("-")
    nodes = least
    pool = sky.ComputePool(
        sky.AWS(instance_types=["m5.large"], client_cidr=cidr, lease_s=float(lease_s)),
        nodes=(int(least), int(most)) if most else int(least),
        name=name, allocation="on-demand", detached_for_s=float(for_s), budget_usd=float(budget_usd),
        image=sky.Image(pip_index_url=index), logs=False, console=False,
    ).start()
    return pool, [wait("/tmp/go", f"{name}{node}") > pool.node(node) for node in range(int(nodes))]

def is_alone(pool, futures):
    return all(future.running() for future in futures) and (len(futures) == 1 or pool.engine == "ray")

with ThreadPoolExecutor() as threads:
    pools = list(threads.map(opened, wanted))
while not all(is_alone(pool, futures) for pool, futures in pools):
    time.sleep(0.05)
with open(said + ".new", "w") as file:
    file.write(repr([pool.cost_usd for pool, _ in pools]))
os.rename(said + ".new", said)
time.sleep(600)
"""

ELSEWHERE = """
import os, sys
import skyward as sky

with sky.ComputePool.attach(file=sys.argv[1], logs=False, console=False) as pool:
    print(pool.engine, *sky.compute(lambda: os.uname().nodename)() @ pool, pool.cost_usd)
"""

# By value, because this module is not on the nodes.
where = sky.compute(lambda: os.uname().nodename)

Killed = Callable[..., list[float]]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def killed(ec2: Ec2, ray_index: PackageIndex, runtime: Path, tmp_path: Path) -> Iterator[Killed]:
    """Return a function that opens detached pools in a program, kills it with its keeper, and returns their costs."""
    script, said, log = runtime / "client.py", tmp_path / "said", tmp_path / "log"
    script.write_text(PROGRAM)
    clients: list[subprocess.Popen[bytes]] = []

    def give(*wanted: str) -> list[float]:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, script, ec2.client_cidr, ray_index.simple, str(LEASE_S), said, *wanted],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=runtime,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
        clients.append(process)
        until(lambda: said.exists() or process.poll() is not None, 240)
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


def recorded(name: str) -> detached.DetachedPool:
    known = detached.living(name)
    assert known is not None
    return known


def running(ec2: Ec2) -> set[str]:
    return {machine.id for machine in ec2.machines("pending", "running")}


def test_pools_of_a_killed_client_go_on_until_they_are_closed_or_taken_down(
    ec2: Ec2, killed: Killed, capsys: pytest.CaptureFixture[str]
) -> None:
    cost, _ = killed("train,600,50,1", "other,600,50,1")
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
    assert pool.future(call).result(60) == "train0"
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


def test_several_machines_go_on_and_the_next_program_replaces_one_that_is_lost(
    ec2: Ec2, killed: Killed, tmp_path: Path
) -> None:
    (cost,) = killed("train,600,50,3")
    known = detached.living("train")
    assert known is not None
    lost, stay = known.others[1]["instance"], {known.machine["instance"], known.others[0]["instance"]}
    assert main(["gc"]) == 0
    assert running(ec2) == {lost, *stay}

    kill(ec2.host(lost), "agent")
    until(lambda: running(ec2) == stay, LEASE_S / 2)  # a machine without a node does not wait for its lease
    for instance in stay:
        ec2.host(instance).write("/tmp/go", "")
    events: list[sky.events.Event] = []
    pool = sky.ComputePool.attach("train", logs=False, console=False, on_event=events.append)
    *done, failed = [pool.future(call) for call in pool.calls()]
    assert [future.result(60) for future in done] == ["train0", "train1"]
    with pytest.raises(NodeLost, match="node 2 was lost"):
        failed.result(60)
    until(lambda: any(isinstance(event, sky.events.NodeReplaced) for event in events), REPLACED_S)
    names = where() @ pool
    assert len(running(ec2)) == 3
    assert sorted(names) == sorted(machine.name for machine in ec2.machines("running"))
    pool.detach()
    known = detached.living("train")
    assert known is not None
    assert set(known.spending["running"]) == running(ec2), "one that has ended costs nothing more"
    file = tmp_path / "train.pool"
    assert main(["ps", "train", "--export", str(file)]) == 0
    engine, *others, spent = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, file],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "elsewhere")},
        timeout=120,
        check=True,
    ).stdout.split()
    assert engine == "ray", "it carried the calls to all nodes when the program left"
    assert others == names
    assert float(spent) > cost
    assert ec2.left() == []
    with pytest.raises(UsageError, match=r"'train'.* ended on .* is gone"):
        sky.ComputePool.attach("train")
    assert main(["gc"]) == 0
    assert journals() == []


def test_an_elastic_pool_rents_and_gives_back_machines_for_each_program(ec2: Ec2, killed: Killed) -> None:
    killed("train,600,50,1-3")
    (first,) = running(ec2)
    pool = sky.ComputePool.attach("train", logs=False, console=False)
    pool.scale(2)
    ec2.host(first).write("/tmp/go", "")
    (call,) = pool.calls()
    assert pool.future(call).result(60) == "train0"
    futures = [where() > pool.node(node) for node in range(2)]
    assert len({future.result(60) for future in futures}) == 2
    pool.detach()
    assert [other["node"] for other in recorded("train").others] == [1]
    assert set(recorded("train").spending["running"]) == running(ec2)
    assert main(["gc"]) == 0
    assert len(running(ec2)) == 2, "they are not left over"

    pool = sky.ComputePool.attach("train", logs=False, console=False)
    assert len(where() @ pool) == 2
    pool.scale(1)
    until(lambda: running(ec2) == {first}, REPLACED_S)
    pool.detach()  # waits until the record knows that
    assert recorded("train").others == ()
    assert set(recorded("train").spending["running"]) == {first}, "what has ended costs nothing more"
    with sky.ComputePool.attach("train", logs=False, console=False) as pool:
        assert len(where() @ pool) == 1
        pool.scale(3)
        assert len(where() @ pool) == 3
    assert ec2.left() == []
    assert main(["gc"]) == 0
    assert journals() == []


def test_a_pool_that_nobody_attaches_to_terminates_its_machines_when_time_or_money_is_over(
    ec2: Ec2, killed: Killed, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = sky.AWS(instance_types=["m5.large"], client_cidr=ec2.client_cidr)
    price = sky.ComputePool(provider, allocation="on-demand").offers()[0].price_usd_per_hour
    # After `ALONE_S` the rest pays for the end alone. A client that is there goes on for about `LEASE_S` more.
    killed("short,2,50,2", f"poor,3600,{price * (ALONE_S + LEASE_S + ENDING_S) / 3600},1")
    assert len(ec2.machines()) == 3
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
