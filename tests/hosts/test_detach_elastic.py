"""Detached pools that are elastic: each client scales them, and without one they stay as they are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.cli import main
from skyward.errors import UsageError
from skyward.state import detached
from tests.hosts.bed import ROOT, Bed
from tests.hosts.faults import Place, kill_head, nothing_runs_on, pids
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 120.0
"""Longest wait for a node, or for Ray, on a busy machine."""
LEASE_S = 30.0
GO = "/root/go-elastic"

PROGRAM = """
import sys, time
import skyward as sky

hosts, config, index, lease_s = sys.argv[1:]

@sky.compute
def double(number):
    time.sleep(2)
    return 2 * number

provider = sky.SSH(hosts=hosts.split(), config_file=config, lease_s=float(lease_s))
pool = sky.ComputePool(
    provider, nodes=(1, 3), name="grow", detached_for_s=600.0, concurrency=2, idle_timeout_s=6.0, logs=False,
    image=sky.Image(pip_index_url=index),
).start()
future = double(21) > pool
while not future.running():
    time.sleep(0.01)
print("sent", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="class")
def place(
    bed: Bed,
    hosts: Callable[[int], list[Host]],
    ray_index: PackageIndex,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Place]:
    here = Place(bed=bed, index=ray_index, hosts=hosts(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        try:
            yield here
        finally:
            for pool in detached.detached_pools():
                if not pool.has_ended:
                    main(["down", pool.pool, "--yes"])
            stop_going(here)
    nothing_runs_on(here.hosts)


def attach(events: list[sky.events.Event] | None = None) -> sky.ComputePool:
    return sky.ComputePool.attach("grow", logs=False, on_event=None if events is None else events.append)


def others() -> list[int]:
    """Return the nodes on record beside the first one."""
    known = detached.living("grow")
    assert known is not None
    return [machine["node"] for machine in known.others]


def where() -> sky.ComputeFunction[[], str]:
    """Return a function that returns the name of its host; it travels by value."""
    return sky.compute(lambda: os.uname().nodename)


def wait_for_go() -> sky.ComputeFunction[[int], int]:
    """Return a function that returns its number once it may; it travels by value."""

    def run(number: int) -> int:
        while not os.path.exists(GO):
            time.sleep(0.01)
        return number

    return sky.compute(run)


def go(place: Place) -> None:
    for host in place.hosts:
        host.write(GO, "")


def stop_going(place: Place) -> None:
    for host in place.hosts:
        host.run("rm", "-f", GO)


class TestElastic:
    """Tests that share one pool, in this order."""

    def test_a_pool_of_one_node_goes_on_when_its_program_is_killed(self, place: Place, tmp_path: Path) -> None:
        script = tmp_path / "program.py"
        script.write_text(PROGRAM)
        names = " ".join(host.name for host in place.hosts)
        arguments = names, str(place.bed.ssh_config), place.index.simple, str(LEASE_S)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            [sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True, env=environment
        ) as program:
            assert program.stdout is not None
            line = program.stdout.readline()
            program.kill()
        assert line == "sent\n"
        pool = attach()
        (call,) = pool.calls()
        assert pool.future(call).result(60) == 42
        assert pool.spec.max_nodes == 3
        pool.detach()

    def test_the_next_program_brings_nodes_that_go_on_without_it(
        self, place: Place, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pool = attach()
        pool.scale(3)
        run = wait_for_go()
        futures = [run(node) > pool.node(node) for node in range(3)]
        until(lambda: all(future.running() for future in futures))
        pool.detach()  # waits for Ray
        assert others() == [1, 2]
        capsys.readouterr()
        assert main(["ls", "--local"]) == 0
        assert "3/1-3" in capsys.readouterr().out
        go(place)
        pool = attach()
        until(lambda: pool.engine == "ray", within_s=LIMIT_S)
        assert sorted(pool.future(call).result(60) for call in pool.calls()) == [0, 1, 2]
        assert sorted(where()() @ pool) == [host.name for host in place.hosts]
        pool.detach()

    def test_idle_nodes_go_and_a_call_brings_the_one_that_it_names(self, place: Place) -> None:
        events: list[sky.events.Event] = []
        pool = attach(events)
        until(lambda: others() == [], within_s=LIMIT_S)  # its idle_timeout_s is 6
        nothing_runs_on(place.hosts[1:])
        assert [event.nodes for event in events if isinstance(event, sky.events.PoolScaled)][-1] == 1
        pool.detach()
        pool = attach()
        assert where()() >> pool.node(0) == place.hosts[0].name
        assert where()() >> pool.node(2) in [host.name for host in place.hosts[1:]]
        pool.detach()
        assert others() == [2]

    def test_a_program_without_the_code_says_why_it_cannot_scale(
        self, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "grow.pool"
        assert main(["ps", "grow", "--export", str(file)]) == 0
        with monkeypatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", str(tmp_path))
            pool = sky.ComputePool.attach(file=file, logs=False)
            with pytest.raises(UsageError, match="its code is not on this machine; attach on the one that opened it"):
                pool.scale(3)
            assert len(where()() @ pool) == 2
            pool.detach()

    def test_a_call_that_names_a_coming_node_waits_for_the_next_program(self, place: Place) -> None:
        pool = attach()
        pool.scale(1)
        until(lambda: others() == [])
        events: list[sky.events.Event] = []
        pool.detach()
        pool = attach(events)
        future = where()() > pool.node(1)
        until(lambda: any(isinstance(event, sky.events.PoolScaled) for event in events))
        pool.detach()  # while the node is launched
        del future
        pool = attach()
        (call,) = pool.calls()
        assert pool.future(call).result(LIMIT_S) in [host.name for host in place.hosts[1:]]
        pool.scale(2)
        pool.detach()

    def test_a_node_that_was_to_go_takes_calls_of_the_next_program(self, place: Place) -> None:
        stop_going(place)
        pool = attach()
        pool.scale(2)
        future = wait_for_go()(7) > pool.node(1)
        until(future.running)
        pool.scale(1)  # node 1 goes when its call has ended
        pool.detach()
        del future
        pool = attach()
        assert (where()() > pool.node(1)).result(LIMIT_S) in [host.name for host in place.hosts[1:]]
        go(place)
        (call,) = pool.calls()
        assert pool.future(call).result(60) == 7
        pool.detach()

    def test_a_head_that_is_killed_knows_its_nodes_and_those_that_rest(self, place: Place) -> None:
        stop_going(place)
        pool = attach()
        pool.scale(2)
        run = wait_for_go()
        futures = [run(node) > pool.node(node) for node in range(2)]
        until(lambda: all(future.running() for future in futures))
        pool.detach()
        kill_head(place.hosts[0])
        go(place)
        pool = attach()
        assert sorted(pool.future(call).result(60) for call in pool.calls()) == [0, 1]
        assert where()() >> pool.node(2) in [host.name for host in place.hosts]
        pool.scale(3)  # none of them goes while the machine is busy
        assert len(set(where()() @ pool)) == 3
        pool.detach()
        assert others() == [1, 2]

    def test_a_node_joins_although_the_head_is_killed_meanwhile(self, place: Place) -> None:
        pool = attach()
        pool.scale(1)
        until(lambda: others() == [])
        nothing_runs_on(place.hosts[1:])
        scaling = threading.Thread(target=pool.scale, args=(3,))
        scaling.start()
        until(lambda: any(pids(host, "agent") for host in place.hosts[1:]), within_s=LIMIT_S)
        kill_head(place.hosts[0])
        scaling.join(LIMIT_S)
        assert not scaling.is_alive()
        until(lambda: len(where()() @ pool) == 3, within_s=LIMIT_S)
        until(lambda: pool.engine == "ray", within_s=LIMIT_S)
        pool.close()
        nothing_runs_on(place.hosts)
