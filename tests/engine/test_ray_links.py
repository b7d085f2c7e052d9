"""Pools whose links to the nodes a real Ray carries: the shipped engine suite, and what breaks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.engine.ray.settings import NICENESS
from skyward.errors import NodeLost
from skyward.integrations.ray_cluster import RayClusterIntegration
from skyward.testing import ProcessEngineSuite
from skyward.testing.engine_suite import appear, wait_for
from skyward.values.topology import Rank
from tests.engines import ray_pool
from tests.providers.raylets import start_ray
from tests.waiting import until

pytestmark = pytest.mark.slow  # Ray's processes start for half a minute of processor time
LEAN = Path(__file__).parent.parent / "lean"
"""Path of a module that spares each process of Ray a second of work."""
LIMIT_S = 60.0
HEAD = Rank(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node=0,
    node_rank=0,
    nodes=1,
    head_addr="127.0.0.1",
    head_port=0,
    local_addr="127.0.0.1",
)


class RayOfTests:
    """A cluster of two nodes of Ray on this machine, with a driver. Owns its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.driver = folder / "driver.sock"
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        patience = RayClusterIntegration().environment(HEAD)
        self._environment = os.environ | patience | token | NICENESS | {"PYTHONPATH": str(LEAN)}
        self._address = ""
        self._driving: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.start_node(0, "--head", "--port=0", "--include-dashboard=false", f"--temp-dir={self.folder}")
        self._address = (self.folder / "ray_current_cluster").read_text().strip()
        self.start_node(1)
        self.drive()

    def start_node(self, node: int, *options: str) -> None:
        """Start a node as skyward does: it runs no tasks, and keeps little."""
        options = options or (f"--address={self._address}",)
        sizes = ("--num-cpus=0", "--num-gpus=0", f"--object-store-memory={80 << 20}", "--include-log-monitor=false")
        ports = ("--node-ip-address=127.0.0.1", "--min-worker-port=0", "--max-worker-port=0")
        name = json.dumps({f"skyward-{node}": 1})
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *sizes, *ports, "--resources", name]
        start_ray(command, self._environment, clear=lambda: self.end(f"skyward-{node}" if self._address else ""))

    def drive(self) -> None:
        """Start a driver in place of the one before."""
        self.end_driver()
        driving = self._driving = subprocess.Popen(
            [sys.executable, "-m", "skyward.engine.ray.driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
        )
        assert driving.stdin is not None
        assert driving.stdout is not None
        order = {"address": self._address, "pool": "tests", "socket": str(self.driver)}
        driving.stdin.write(json.dumps(order).encode() + b"\n")
        driving.stdin.flush()
        assert json.loads(driving.stdout.readline()) == {"listens": str(self.driver)}

    def end_driver(self) -> None:
        """Kill the driver."""
        if self._driving is None:
            return
        with self._driving as driving:
            driving.kill()
        self._driving = None

    def end_node(self, node: int) -> None:
        """Kill the raylet of a node."""
        (raylet,) = self.processes(f'"skyward-{node}"') or self.processes(f"skyward-{node},1")
        os.kill(raylet, signal.SIGKILL)

    def processes(self, name: str) -> list[int]:
        """Return the processes of this cluster whose command line has a text."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # has ended
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes()
                if name in command and self._environment["RAY_AUTH_TOKEN"].encode() in environment:
                    found.append(int(entry.name))
        return found

    def end(self, name: str = "") -> None:
        """Kill the processes of this cluster whose command line has a text."""
        while pids := self.processes(name):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            until(lambda pids=pids: not set(pids) & set(self.processes(name)), within_s=LIMIT_S)  # type: ignore[misc]

    def close(self) -> None:
        self.end_driver()
        self.end()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayOfTests]:
    with tempfile.TemporaryDirectory(prefix="sky-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = RayOfTests(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()


@pytest.fixture(scope="module")
def processes(cluster: RayOfTests) -> Iterator[sky.ComputePool]:
    pool, ways = ray_pool(nodes=2, concurrency=2, cancel_grace_s=0.3, logs=False)
    with pool:
        ways.stands(str(cluster.driver))
        until(lambda: ways.by_ray == {0, 1}, within_s=LIMIT_S)
        yield pool
        until(lambda: ways.by_ray == {0, 1}, within_s=LIMIT_S)  # a node that the suite has killed, too


class TestProcesses(ProcessEngineSuite):
    @pytest.fixture
    def pool(self, processes: sky.ComputePool) -> sky.ComputePool:
        return processes


class Running:
    """A pool with calls under way, which end well if no byte is lost or comes twice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[sky.events.Event] = []
        self.pool, self.ways = ray_pool(nodes=2, concurrency=2, logs=False, on_event=self.events.append)

    def begin(self) -> None:
        def count(go: Path) -> Iterator[bytes]:
            for number in range(100):
                yield bytes([number]) * 50_000
            wait_for(go)
            for number in range(100, 200):
                yield bytes([number]) * 50_000

        self._taken: list[list[bytes]] = [[], []]
        self._streams = [iter(sky.compute(count)(self.folder / "go") >> self.pool) for _ in range(2)]
        for stream, taken in zip(self._streams, self._taken, strict=True):
            taken.extend(next(stream) for _ in range(50))

    def end(self) -> None:
        """Let the calls end, and check what they brought and that nobody was told of a lost node."""
        appear(self.folder / "go")
        for stream, taken in zip(self._streams, self._taken, strict=True):
            taken.extend(stream)
            assert taken == [bytes([number]) * 50_000 for number in range(200)]
        assert not [event for event in self.events if isinstance(event, sky.events.NodeLost)]

    def move(self, driver: Path) -> None:
        """Let Ray stand, and wait until it carries the links."""
        self.ways.stands(str(driver))
        self.are_by_ray(0, 1)

    def are_by_ray(self, *nodes: int) -> None:
        """Wait until these nodes and no others are reached by Ray, and all answer."""
        until(lambda: self.ways.by_ray == set(nodes), within_s=LIMIT_S)
        self.answers()

    def answers(self) -> None:
        """Wait until both nodes answer again."""
        assert sky.compute(len)("four") @ self.pool == [4, 4]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    with running.pool:
        running.begin()
        yield running


def test_calls_notice_nothing_when_their_links_move_to_ray(cluster: RayOfTests, running: Running) -> None:
    running.move(cluster.driver)
    running.end()
    assert not [event for event in running.events if isinstance(event, sky.events.LinkLost)]


def test_calls_go_on_when_the_bridges_die(cluster: RayOfTests, running: Running) -> None:
    running.move(cluster.driver)
    for pid in cluster.processes("ray::Bridge"):
        os.kill(pid, signal.SIGKILL)
    until(lambda: sum(isinstance(event, sky.events.LinkRestored) for event in running.events) >= 2, within_s=LIMIT_S)
    running.are_by_ray(0, 1)  # by new bridges
    running.end()


def test_calls_go_on_when_the_driver_dies(cluster: RayOfTests, running: Running) -> None:
    running.move(cluster.driver)
    cluster.end_driver()
    running.are_by_ray()
    cluster.drive()
    running.move(cluster.driver)
    running.end()


def test_calls_go_on_when_a_node_of_ray_dies(cluster: RayOfTests, running: Running) -> None:
    running.move(cluster.driver)
    cluster.end_node(1)
    running.are_by_ray(0)
    cluster.start_node(1)
    running.are_by_ray(0, 1)
    running.end()


def test_a_dead_agent_is_a_lost_node_at_once(cluster: RayOfTests, running: Running) -> None:
    running.move(cluster.driver)
    os.kill(running.pool.agent_pids()[1], signal.SIGKILL)
    with pytest.raises(NodeLost):
        running.end()
    until(lambda: any(isinstance(event, sky.events.NodeLost) for event in running.events))
    assert "no agent" in next(event.reason for event in running.events if isinstance(event, sky.events.NodeLost))
