"""Pools on hosts whose scheduler runs in a head beside the first node."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import NodeLost
from skyward.values.machine import LogLine
from tests.engine.test_hosted_faults import children_of
from tests.engines import hosted_pool
from tests.hosts.bed import ROOT, Bed
from tests.hosts.faults import (
    EPSILON_S,
    Place,
    client_processes,
    gang_of,
    kill,
    nested_call_s,
    nothing_runs_on,
    pids,
)
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.relay import Relay
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

SECRET = f"secret-{os.urandom(8).hex()}"
LEASE_S = 15.0
SHORT_LEASE_S = 8.0
RAY_S = 120.0
"""Longest wait for Ray on a busy machine. It stands within 20 s on a free one."""
DELAY_S = 0.5

# Calls travel by value, because this module is not on the nodes.
where = sky.compute(lambda: os.uname().nodename)


@dataclass(frozen=True, kw_only=True)
class Headed:
    pool: sky.ComputePool
    place: Place
    line: Relay
    """Relay between the client and the host of the head."""
    lines: list[LogLine] = field(default_factory=list)


@pytest.fixture(scope="class")
def headed(bed: Bed, hosts: Callable[[int], list[Host]], package_index: PackageIndex) -> Iterator[Headed]:
    place = Place(bed=bed, index=package_index, hosts=hosts(3))
    with place.ssh_by_relay(LEASE_S) as (provider, line):
        image = sky.Image(pip_index_url=package_index.simple, env={"TOKEN": sky.Secret("TOKEN", value=SECRET)})
        lines: list[LogLine] = []
        with hosted_pool(provider, image=image, nodes=3, concurrency=2, logs=lines.append) as pool:
            yield Headed(pool=pool, place=place, line=line, lines=lines)
        nothing_runs_on(place.hosts)


class TestOpenPool:
    """Tests that share one pool."""

    def test_calls_of_all_kinds(self, headed: Headed) -> None:
        @sky.compute
        def doubled(items: Iterator[int]) -> Iterator[bytes]:
            for item in items:
                yield bytes([item]) * 500_000

        pool, names = headed.pool, [host.name for host in headed.place.hosts]
        assert where() @ pool == names
        assert gang_of(lambda: os.uname().nodename)() @ pool == names
        assert [len(item) for item in doubled(iter(range(5))) >> pool] == [500_000] * 5
        assert pool.map(lambda n: n * n, range(2000)) == [n * n for n in range(2000)]
        with pytest.raises(ZeroDivisionError):
            sky.compute(lambda: 1 // 0)() >> pool

    def test_calls_of_tasks_bring_large_values_of_all_nodes(self, headed: Headed) -> None:
        pool, large = headed.pool, gang_of(lambda: os.uname().nodename.encode() * 100_000)

        @sky.compute
        def nested() -> tuple[list[bytes], list[str]]:
            return [value[:5] for value in large() @ pool], where() @ pool

        names = [host.name for host in headed.place.hosts]
        assert nested() >> pool == ([name.encode() for name in names], names)

    def test_output_is_masked_and_no_secret_lies_about(self, headed: Headed) -> None:
        headed.lines.clear()
        sky.compute(lambda: print("the token is", os.environ["TOKEN"]))() >> headed.pool.node(1)
        assert [(line.text, line.node) for line in headed.lines] == [("the token is ***", 1)]
        first = headed.place.hosts[0]
        assert len(pids(first, "head")) == 1
        assert not [process for process in first.processes() if SECRET in process.command]
        (socket,) = first.run("find", "/tmp", "-name", "head.sock").stdout.split()
        assert first.run("stat", "-c", "%a", os.path.dirname(socket)).stdout.strip() == "700"
        assert first.run("sh", "-c", f"grep -rlsF -D skip {SECRET} /tmp /root/.cache/skyward || true").stdout == ""

    def test_calls_go_on_when_every_link_breaks(self, headed: Headed) -> None:
        pool = headed.pool
        agents = pool.agent_pids()

        def wait(path: str) -> bytes:
            while not os.path.exists(path):
                time.sleep(0.01)
            os.remove(path)
            return b"x" * 3_000_000

        path = f"/root/go-{os.getpid()}"
        futures = [sky.compute(wait)(path) > pool.node(node) for node in range(3)]
        until(lambda: all(future.running() for future in futures))
        for pid in [pid for pid, command in children_of(os.getpid()).items() if "keeper_process" in command]:
            os.kill(pid, signal.SIGKILL)
        for host in headed.place.hosts:
            kill(host, "sshd")
        for host in headed.place.hosts:
            host.write(path, "")
        assert [len(future.result(60)) for future in futures] == [3_000_000] * 3
        assert pool.agent_pids() == agents

    def test_calls_go_on_after_a_cut_shorter_than_the_lease(self, headed: Headed) -> None:
        pool = headed.pool
        agents = pool.agent_pids()

        @sky.compute
        def slow(number: int) -> int:
            time.sleep(0.02)
            return number

        futures = [slow(number) > pool for number in range(600)]
        until(futures[20].done)
        with headed.place.hosts[0].link_cut():
            time.sleep(LEASE_S / 3)
        assert [future.result(60) for future in futures] == list(range(600))
        assert pool.agent_pids() == agents

    def test_a_call_of_a_task_beside_the_head_does_not_wait_for_a_distant_client(self, headed: Headed) -> None:
        headed.line.set_delay(DELAY_S)
        try:
            took_s = nested_call_s(headed.pool, on=0, to=0)
            began = time.monotonic()
            where() >> headed.pool.node(0)
            assert time.monotonic() - began >= 2 * DELAY_S, "the client is distant"
        finally:
            headed.line.set_delay(0.0)
        assert took_s < DELAY_S

    def test_the_head_goes_on_when_the_agent_beside_it_is_killed(self, headed: Headed) -> None:
        pool, first = headed.pool, headed.place.hosts[0]
        heads = [head.pid for head in pids(first, "head")]
        began = time.monotonic()
        kill(first, "agent")
        call = sky.compute(lambda: os.uname().nodename).with_options(retries=5)
        assert call() @ pool == [host.name for host in headed.place.hosts]
        assert time.monotonic() - began < LEASE_S, "the next agent's login reaches it"
        assert [head.pid for head in pids(first, "head")] == heads


@pytest.mark.slow
def test_another_head_goes_on_when_one_is_killed_and_when_its_host_loses_its_power(
    bed: Bed, hosts: Callable[[int], list[Host]], ray_index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.providers.ssh._CONNECT_S", 2.0)  # no option: only tests wait for nobody
    here, path = Place(bed=bed, index=ray_index, hosts=hosts(3)), "/root/ran-in-turn"
    events: list[sky.events.Event] = []

    class Counter:  # by value, as all calls here
        def __init__(self) -> None:
            self.count = 0

        def more(self) -> int:
            self.count += 1
            return self.count

    def note(number: int) -> int:
        with open(path, "a", encoding="ascii") as file:
            file.write(f"{number}\n")
        time.sleep(0.01)
        return number

    def late() -> str:  # until the loss is known
        time.sleep(20.0)
        return os.uname().nodename

    def ran(*hosts: Host) -> list[str]:
        return [line for host in hosts for line in host.run("sh", "-c", f"cat {path} || true").stdout.split()]

    first, second, spare = here.hosts

    def raised() -> int:
        return sum(isinstance(event, sky.events.EngineUp) for event in events)

    options: dict[str, Any] = {"image": here.image, "nodes": 2, "concurrency": 2, "logs": False}
    with sky.ComputePool(here.ssh(SHORT_LEASE_S), engine="ray", on_event=events.append, **options) as pool:
        agents = pool.agent_pids()
        counter: Any = sky.actor(Counter)() >> pool.node(1)
        assert counter.more() >> pool == 1
        stays = sky.compute(bytes)(2_000_000).keep() >> pool.node(1)
        values = []
        for value in pool.imap(note, range(400)):
            values.append(value)
            if len(values) == 50:
                mine = max(pids(first, "head"), key=lambda process: process.pid)
                os.kill(mine.outside_pid, signal.SIGKILL)
        assert values == list(range(400))
        assert sorted(map(int, ran(first, second))) == values, "each ran once"
        assert pool.agent_pids() == agents
        assert len(stays.get()) == 2_000_000
        assert counter.more() >> pool == 2

        until(raised, within_s=RAY_S)
        more = pool.imap(sky.compute(note).with_options(retries=5), range(1000, 1400))
        got = [next(more) for _ in range(50)]
        kept = [sky.compute(late)() > pool.node(1) for _ in range(2)]
        doubtful = [sky.compute(time.sleep)(600) > pool.node(0) for _ in range(2)]
        until(lambda: all(future.running() for future in kept + doubtful))
        waiting = [sky.compute(note)(number) > pool for number in range(2000, 2060)]
        gang = gang_of(note).with_options(nodes=2)(3000) > pool
        first.power_loss()
        for future in doubtful:
            with pytest.raises(NodeLost, match="may have begun"):
                future.result(60)
        got.extend(more)
        assert got == list(range(1000, 1400))
        assert [future.result(60) for future in kept] == [second.name] * 2
        failed = [future for future in waiting if future.exception(60) is not None]
        assert len(failed) <= 20, "most had not begun, and the client knows it"
        done = [future.result() for future in waiting if future not in failed]
        begun = sorted(int(line) for line in ran(second, spare) if 2000 <= int(line) < 2060)
        assert begun == sorted(set(begun)), "each ran once"
        assert set(begun) <= set(done), "none that failed has begun elsewhere"
        assert gang.result(60) == [3000] * 2
        assert ran(second, spare).count("3000") == 2, "the gang had not begun, so it began once"
        assert where() @ pool == [spare.name, second.name]
        assert sky.compute(len)(stays) @ pool == [2_000_000] * 2
        assert counter.more() >> pool == 3
        assert pids(second, "head")
        until(lambda: raised() == 2, within_s=RAY_S)
    nothing_runs_on([second, spare])
    first.start().wait_ssh()


@pytest.mark.slow
def test_another_head_goes_on_for_one_that_is_cut_off_and_when_the_other_node_loses_its_power(
    place: Callable[[int], Place],
) -> None:
    here, go, lease_s = place(2), f"/root/go-{time.monotonic_ns()}", 6.0
    first, second = here.hosts

    def wait(path: str) -> str:
        while not os.path.exists(path):
            time.sleep(0.01)
        return os.uname().nodename

    options: dict[str, Any] = {"image": here.image, "nodes": 2, "concurrency": 1, "logs": False}
    with hosted_pool(here.ssh(lease_s), **options) as pool:
        lost, kept = (sky.compute(wait)(go) > pool.node(node) for node in range(2))
        waits = sky.compute(wait)(go) > pool.node(1)
        until(lambda: kept.running() and lost.running())
        with first.link_cut():
            with pytest.raises(NodeLost, match="may have begun"):
                lost.result(lease_s + EPSILON_S)
            nothing_runs_on([first], EPSILON_S)
            second.write(go, "")
            assert [future.result(60) for future in (kept, waits)] == [second.name] * 2
            assert pids(second, "head")
        assert where().with_options(retries=3) @ pool == [first.name, second.name], "the host is back, and a node again"
        zygotes = {process.pid for process in pids(second, "zygote")}
        gang = gang_of(wait).with_options(nodes=2, max_restarts=1)(f"{go}-gang") > pool
        until(lambda: gang.running() and all(len(pids(host, "slot")) > 1 for host in here.hosts))
        first.power_loss()
        first.start().wait_ssh()
        for host in here.hosts:
            host.write(f"{go}-gang", "")
        assert gang.result(60) == [first.name, second.name], "the gang goes on with the replacement"
        assert zygotes <= {process.pid for process in pids(second, "zygote")}
    nothing_runs_on(here.hosts)


PROGRAM = """
import sys, time
import skyward as sky
from tests.engines import hosted_pool

hosts, config, index, lease_s = sys.argv[1:]
provider = sky.SSH(hosts=hosts.split(), config_file=config, lease_s=float(lease_s))
with hosted_pool(provider, nodes=3, image=sky.Image(pip_index_url=index), logs=False) as pool:
    future = sky.compute(time.sleep)(600) > pool
    while not future.running():
        if future.done():  # a node was lost: say so, instead of waiting for ever
            future.result()
        time.sleep(0.01)
    print("running", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("keeper", ["lives", "dies too"])
def test_a_killed_client_leaves_nothing(
    bed: Bed, hosts: Callable[[int], list[Host]], package_index: PackageIndex, runtime: Path, keeper: str
) -> None:
    three, lease_s = hosts(3), 600.0 if keeper == "lives" else 12.0
    script = runtime / "client.py"
    script.write_text(PROGRAM)
    names = " ".join(host.name for host in three)
    client = subprocess.Popen(
        [sys.executable, script, names, bed.ssh_config, package_index.simple, str(lease_s)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(runtime), "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert client.stdout is not None
    try:
        assert client.stdout.readline() == "running\n"
        assert pids(three[0], "head")
        (watching,) = client_processes(runtime)["keeper"]
        if keeper == "dies too":
            os.kill(watching, signal.SIGSTOP)  # else it would do its work in an instant
        client.kill()
        if keeper == "dies too":
            os.kill(watching, signal.SIGKILL)
        # The head ends with its lease. Until then it renews that of the node beside it.
        nothing_runs_on(three, (0.0 if keeper == "lives" else 2 * lease_s) + EPSILON_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(client.pid, signal.SIGKILL)
        client.wait()
        client.stdout.close()
        for pid in [pid for found in client_processes(runtime).values() for pid in found]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
