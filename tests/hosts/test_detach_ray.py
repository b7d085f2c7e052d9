"""Detached pools of three nodes: Ray carries them while no client is there."""

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

import pytest

import skyward as sky
from skyward.cli import main
from skyward.errors import NodeLost, UsageError
from skyward.state import detached
from tests.hosts.bed import ROOT, Bed
from tests.hosts.faults import EPSILON_S, Place, gang_of, kill, kill_head, nothing_runs_on, ray_processes
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 120.0
"""Longest wait for Ray on a busy machine. It stands within 20 s on a free one."""
LEASE_S = 30.0
"""Lease of the nodes. Only the head renews it while no client is there."""
GO = "/root/go-by-ray"
LEDGER = "/root/ran-by-ray"
SECRET = os.urandom(8).hex()
"""Not in this file, which is part of the user's code."""

PROGRAM = """
import os, sys, time
import skyward as sky

what, hosts, config, index, lease_s = sys.argv[1:]
hosts = hosts.split()

@sky.compute
def wait(number):
    with open("/root/ran-by-ray", "a") as ledger:
        ledger.write(f"{number} ")
    while not os.path.exists("/root/go-by-ray"):
        time.sleep(0.01)
    return number

@sky.compute
def count():
    for number in range(100):
        yield number
        while number == 49 and not os.path.exists("/root/go-by-ray"):
            time.sleep(0.01)

events = []

def wait_for(is_true):
    until = time.monotonic() + 240
    while not is_true() and time.monotonic() < until:
        time.sleep(0.01)

if what == "attach":
    pool = sky.ComputePool.attach("train", logs=False)
else:
    provider = sky.SSH(hosts=hosts, config_file=config, lease_s=float(lease_s))
    pool = sky.ComputePool(
        provider, nodes=len(hosts), engine="ray", name="train", detached_for_s=600.0, concurrency=2, logs=False,
        image=sky.Image(pip_index_url=index, env={"MODE": "fast", "TOKEN": sky.Secret("TOKEN")}),
        on_event=events.append,
    ).start()
if what == "leave":
    pool.detach()
    print("left", flush=True)
    sys.exit()
if what == "wait":
    print("opened", flush=True)
    time.sleep(600)
if what == "open":
    wait_for(lambda: pool.engine == "ray")
    print("up", flush=True)
    wait_for(lambda: any(isinstance(event, sky.events.NodeReplaced) for event in events))
    wait_for(lambda: pool.engine == "ray")
    streams = [iter(count() >> pool.node(node)) for node in range(3)]
    assert [[next(stream) for _ in range(10)] for stream in streams] == [list(range(10))] * 3
    futures = [wait(node) > pool.node(node) for node in range(3)]
    pool.detach()
    print("left", flush=True)
else:
    futures = [wait(number) > pool for number in range(60)]
    wait_for(lambda: sum(future.running() for future in futures) == 6)
    print("sent", flush=True)
    time.sleep(600)
"""


def recorded() -> sky.ComputeFunction[[int], int]:
    """Return a function that writes its number to the ledger of its host, waits and returns it; it travels by value."""

    def run(number: int) -> int:
        with open(LEDGER, "a") as ledger:
            ledger.write(f"{number} ")
        while not os.path.exists(GO):
            time.sleep(0.01)
        return number

    return sky.compute(run)


@dataclass(kw_only=True)
class Clients:
    """Programs that open a pool on three hosts, or attach to it."""

    place: Place
    script: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, what: str, *, nodes: int = 3) -> subprocess.Popen[str]:
        place = self.place
        names = " ".join(host.name for host in place.hosts[:nodes])
        here = names, str(place.bed.ssh_config), place.index.simple
        process = subprocess.Popen(
            [sys.executable, self.script, what, *here, str(LEASE_S)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TOKEN": SECRET},  # this process does not have it
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def ran(self) -> list[int]:
        """Return the numbers that ran on any host."""
        paths = [host.path(LEDGER) for host in self.place.hosts]
        return sorted(int(word) for path in paths if path.exists() for word in path.read_text().split())

    def go(self) -> None:
        for host in self.place.hosts:
            host.write(GO, "")

    def clear(self) -> None:
        for host in self.place.hosts:
            host.run("rm", "-f", GO, LEDGER)

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.fixture(scope="class")
def clients(
    bed: Bed,
    hosts: Callable[[int], list[Host]],
    ray_index: PackageIndex,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Clients]:
    folder = tmp_path_factory.mktemp("state")
    script = folder / "client.py"
    script.write_text(PROGRAM)
    here = Clients(place=Place(bed=bed, index=ray_index, hosts=hosts(3)), script=script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        try:
            yield here
        finally:
            here.close()
            for pool in detached.detached_pools():
                if not pool.has_ended:
                    main(["down", pool.pool, "--yes"])
            here.clear()
    nothing_runs_on(here.place.hosts)
    for host in here.place.hosts:
        host.run("sh", "-c", "mkdir -p -m 700 /tmp/skyward-0; rm -f /tmp/skyward-0/*.ended")
        left = host.run("find", "/tmp/skyward-0", "/dev/shm", "-mindepth", "1").stdout
        assert not left, f"{host.name} keeps {left}"


class TestDetached:
    """Tests that share one pool, in this order: the last one loses it."""

    def test_a_program_leaves_the_pool_and_the_next_one_gets_what_all_nodes_did(self, clients: Clients) -> None:
        client = clients.start("open")
        assert line_of(client) == "up\n"
        kill(clients.place.hosts[1], "agent")  # the program replaces the node, and leaves it like the others
        assert line_of(client) == "left\n"
        client.wait(60)
        left_at = time.monotonic()
        time.sleep(1.2 * LEASE_S)  # longer than any node lives without its head
        clients.go()
        pool = sky.ComputePool.attach("train", logs=False)
        took_s = time.monotonic() - left_at
        assert pool.engine == "ray", took_s
        by_name: dict[str, list[sky.Call]] = {}
        for call in pool.calls():
            by_name.setdefault(call.name, []).append(call)
        assert {name: len(calls) for name, calls in by_name.items()} == {"count": 3, "wait": 3}
        assert [pool.future(call).result(60) for call in by_name["wait"]] == [0, 1, 2]
        assert [list(pool.future(call).result(60)) for call in by_name["count"]] == [list(range(10, 100))] * 3
        assert clients.ran() == [0, 1, 2]
        pool.detach()
        clients.clear()

    def test_calls_of_a_killed_program_come_once(self, clients: Clients) -> None:
        client = clients.start("attach")
        assert line_of(client) == "sent\n"
        client.kill()
        client.wait()
        clients.go()
        pool = sky.ComputePool.attach("train", logs=False)
        assert sorted(pool.future(call).result(60) for call in pool.calls()) == list(range(60))
        until(lambda: not pool.calls())
        assert clients.ran() == list(range(60))
        pool.detach()
        clients.clear()

    def test_calls_go_on_when_the_head_is_killed_while_no_program_is_there(self, clients: Clients) -> None:
        run = recorded()
        pool = sky.ComputePool.attach("train", logs=False)
        futures = [run(node) > pool.node(node) for node in range(3)]
        waiting = [run(number) > pool for number in range(3, 20)]
        until(lambda: len(clients.ran()) == 6)
        until(lambda: all(future.running() for future in futures))  # a call may begin before this program hears of it
        assert not any(future.done() for future in waiting)
        pool.detach()
        kill_head(clients.place.hosts[0])
        clients.go()
        pool = sky.ComputePool.attach("train", logs=False)
        assert sorted(pool.future(call).result(60) for call in pool.calls()) == list(range(20))
        assert clients.ran() == list(range(20)), "nothing ran twice"
        assert pool.engine == "ray", "the next head has another driver, and the same Ray"
        pool.detach()
        clients.clear()

    def test_the_next_program_replaces_a_ray_that_lacks_a_node(self, clients: Clients) -> None:
        where, hosts = sky.compute(lambda: os.uname().nodename), clients.place.hosts
        pool = sky.ComputePool.attach("train", logs=False)
        before = pool.engine
        for pid in ray_processes(hosts[1], "/raylet/raylet"):
            os.kill(pid, signal.SIGKILL)
        until(lambda: pool.engine == "direct", within_s=LIMIT_S)
        assert where() @ pool == [host.name for host in hosts], "this program lends its channels"

        run = recorded()
        futures = [run(node) > pool.node(node) for node in range(3)]
        until(lambda: len(clients.ran()) == 3)
        kill_head(hosts[0])  # the next one gets channels of this program too
        clients.go()
        assert [future.result(60) for future in futures] == [0, 1, 2]
        assert clients.ran() == [0, 1, 2], "nothing ran twice"
        pool.detach()  # waits for the new Ray
        pool = sky.ComputePool.attach("train", logs=False)
        assert (before, pool.engine) == ("ray", "ray")
        assert where() @ pool == [host.name for host in hosts]
        pool.detach()
        clients.clear()

    def test_a_node_that_is_lost_meanwhile_takes_only_its_calls_and_the_next_program_replaces_it(
        self, clients: Clients, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def run(number: int) -> int:
            while not os.path.exists(GO):
                time.sleep(0.01)
            return number

        hosts = clients.place.hosts
        pool = sky.ComputePool.attach("train", logs=False)
        calls = [sky.compute(run)(node) > pool.node(node) for node in range(3)]
        gang = gang_of(run).with_options(nodes=3)(3) > pool
        del gang, calls
        until(lambda: sum(call.state == "running" for call in pool.calls()) == 4)
        pool.detach()
        raylets = ray_processes(hosts[1], "/raylet/raylet")
        kill(hosts[2], "agent")
        clients.go()
        nothing_runs_on(hosts[2:])
        events: list[sky.events.Event] = []
        pool = sky.ComputePool.attach("train", logs=False, on_event=events.append)
        values, errors = [], []
        for future in map(pool.future, pool.calls()):
            try:
                values.append(future.result(60))
            except NodeLost as error:
                errors.append(str(error))
        assert sorted(values) == [0, 1]
        assert len(errors) == 2, "the call on that node, and the gang"
        assert all(error.startswith("node 2 was lost") for error in errors)
        until(lambda: any(isinstance(event, sky.events.NodeReplaced) for event in events), within_s=LIMIT_S)
        assert {event.node for event in events if isinstance(event, sky.events.NodeLost)} == {2}
        environment = sky.compute(lambda: (os.environ["MODE"], os.environ["TOKEN"]))
        assert environment() @ pool == [("fast", SECRET)] * 3
        state = Path(os.environ["XDG_STATE_HOME"])
        assert not [path for path in state.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
        pool.detach()  # the next client knows the new machine
        assert raylets == ray_processes(hosts[1], "/raylet/raylet") != [], "the others keep their Ray"
        pool = sky.ComputePool.attach("train", logs=False)
        assert sky.compute(run)(5) @ pool == [5] * 3
        pool.detach()
        assert main(["ls", "--local"]) == 0
        assert "3/3" in capsys.readouterr().out
        clients.clear()

    def test_nodes_end_by_their_lease_when_the_power_of_the_head_is_lost(self, clients: Clients) -> None:
        def run() -> None:
            while not os.path.exists(GO):
                time.sleep(0.01)

        first, *others = clients.place.hosts
        pool = sky.ComputePool.attach("train", logs=False)
        running = [sky.compute(run)() > pool.node(node) for node in range(3)]
        until(lambda: all(future.running() for future in running))
        pool.detach()
        first.power_loss()
        try:
            nothing_runs_on(others, LEASE_S + EPSILON_S)
        finally:
            first.start()
            first.restore_link()
            first.wait_ssh()
        with pytest.raises(UsageError, match=r"ended on .*, or earlier, because its machine stopped or its head was"):
            sky.ComputePool.attach("train")
        nothing_runs_on(clients.place.hosts)


def test_a_pool_ends_with_its_program_until_ray_stands_and_then_by_the_command_line(
    clients: Clients, capsys: pytest.CaptureFixture[str]
) -> None:
    client = clients.start("wait", nodes=2)
    assert line_of(client) == "opened\n"
    client.kill()
    nothing_runs_on(clients.place.hosts)
    with pytest.raises(UsageError, match="ended on .* because its program died before Ray joined its nodes"):
        sky.ComputePool.attach("train")
    client = clients.start("leave", nodes=2)
    assert line_of(client) == "left\n"
    client.wait(60)
    assert main(["down", "train", "--yes"]) == 0
    assert "ended its head and its 2 nodes" in capsys.readouterr().out
    nothing_runs_on(clients.place.hosts)
