"""Pools on hosts that raise Ray on their nodes: what Ray carries, its deaths, its doors, and what it leaves."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import ProviderError, SlotLost, UsageError
from tests.chaos.schedule import seeds
from tests.engines import raised_pool
from tests.hosts.base import USERS_RAY
from tests.hosts.bed import ROOT, Bed
from tests.hosts.chaos import RAY_WEIGHTS, Chaos
from tests.hosts.faults import (
    Ledger,
    Place,
    client_processes,
    gang_of,
    nested_call_s,
    noted,
    nothing_runs_on,
    ray_processes,
)
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.hosts.users_ray import UsersRay
from tests.relay import Relay
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(300)]

DELAY_S = 0.5
SMALL = 64 << 20
"""Bytes of shared memory on one of the hosts, as in a container. Ray's store would take 256 MiB."""
LIMIT_S = 120.0
"""Longest wait for Ray on a busy machine. It stands within 20 s on a free one."""
CUT_S = 30.0
"""Length of a cut that is shorter than the lease."""
CHAOS_S, SEED = 30.0, 121
"""Length of a schedule, which takes a minute with its faults, and the one that begins with those that matter: it kills
the head, an agent beside it and Ray, and cuts both kinds of lines.
"""
TRIED = "/root/tried-ray"
STAND_IN = f"""
import sys
if "ray.scripts.scripts" in sys.orig_argv:
    with open("{TRIED}", "a") as file:
        file.write("x")
raise ImportError("away")
"""
TAKER = r"""
import pathlib, re, socket, sys, threading, time

def take():
    while True:
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = path.read_text()
            except OSError:
                continue
            ports = re.findall(r"agent(?:-grpc|-listen)?-port=([0-9]+)", command)
            if ports and "ray.scripts" in command:
                global held
                held = [socket.create_server(("", int(port))) for port in ports]
                print(*ports, flush=True)
                return
        time.sleep(0.01)

threading.Thread(target=take, daemon=True).start()
sys.stdin.read()
"""

# Calls travel by value, because this module is not on the nodes.
where = sky.compute(lambda: os.uname().nodename)


@dataclass(kw_only=True)
class OnRay:
    pool: sky.ComputePool
    place: Place
    line: Relay
    """Relay between the client and the host of the head."""
    events: list[sky.events.Event]
    streams: list[Iterator[bytes]] = field(default_factory=list)
    path: str = ""

    @property
    def ups(self) -> int:
        return sum(isinstance(event, sky.events.EngineUp) for event in self.events)

    def begin_calls(self) -> None:
        """Begin a call on each node, which goes on until `end_calls`."""

        def count(path: str) -> Iterator[bytes]:
            for number in range(200):
                yield bytes([number]) * 50_000
                while number == 99 and not os.path.exists(path):
                    time.sleep(0.01)

        self.path = f"/root/go-{time.monotonic_ns()}"
        self.streams = [iter(sky.compute(count)(self.path) >> self.pool.node(node)) for node in range(3)]
        self.taken = [[next(stream) for _ in range(50)] for stream in self.streams]

    def end_calls(self) -> None:
        """Let the calls end, and check what they brought, and that no node was lost."""
        for host in self.place.hosts:
            host.write(self.path, "")
        for stream, taken in zip(self.streams, self.taken, strict=True):
            taken.extend(stream)
            assert taken == [bytes([number]) * 50_000 for number in range(200)]
        assert not [event for event in self.events if isinstance(event, sky.events.NodeLost)]


@pytest.fixture(scope="class")
def on_ray(bed: Bed, hosts: Callable[[int], list[Host]], ray_index: PackageIndex) -> Iterator[OnRay]:
    place = Place(bed=bed, index=ray_index, hosts=hosts(3))
    with contextlib.ExitStack() as stack:
        provider, line = stack.enter_context(place.ssh_by_relay(60.0))
        for host, offset_s in zip(place.hosts[1:], (3600.0, -3600.0), strict=True):
            stack.callback(host.set_clock, 0.0)
            host.set_clock(offset_s)
        stack.enter_context(place.hosts[2].disk_full("/dev/shm", left_kib=SMALL >> 10))
        events: list[sky.events.Event] = []
        options: dict[str, Any] = {"image": place.image, "nodes": 3, "concurrency": 2, "logs": False}
        with sky.ComputePool(provider, engine="ray", on_event=events.append, **options) as pool:
            here = OnRay(pool=pool, place=place, line=line, events=events)
            here.begin_calls()
            assert (pool.engine, here.ups) == ("direct", 0)
            until(lambda: here.ups, within_s=LIMIT_S)
            assert pool.engine == "ray"
            here.end_calls()
            assert not [event for event in events if isinstance(event, sky.events.LinkLost)]
            yield here
        nothing_runs_on(place.hosts, 5.0)
        for host in place.hosts:
            assert host.run("sh", "-c", "ls /tmp/skyward-0 /dev/shm").stdout.split() == ["/dev/shm:", "/tmp/skyward-0:"]


class TestRaised:
    """Tests that share one pool. The fixture sees that calls under way notice nothing when Ray takes over.

    The clocks of its hosts are an hour apart, and one of them has little shared memory. The last test kills nodes.
    """

    def test_clocks_may_differ_and_shared_memory_may_be_small(self, on_ray: OnRay) -> None:
        times = sky.compute(time.time)() @ on_ray.pool
        assert [round((now - time.time()) / 3600) for now in times] == [0, 1, -1]
        size = SMALL + (16 << 20)
        kept = sky.compute(bytes)(size).keep() >> on_ray.pool.node(1)
        assert sky.compute(len)(kept) >> on_ray.pool.node(2) == size

    def test_a_call_of_a_task_on_another_node_does_not_wait_for_a_distant_client(self, on_ray: OnRay) -> None:
        on_ray.line.set_delay(DELAY_S)
        try:
            took_s = [nested_call_s(on_ray.pool, on=node, to=1) for node in (0, 2)]
        finally:
            on_ray.line.set_delay(0.0)
        assert max(took_s) < DELAY_S

    def test_large_values_cross_the_uplink_once_or_never(self, on_ray: OnRay) -> None:
        size, statistics = 32 << 20, Path(f"/sys/class/net/{on_ray.place.bed.name}/statistics")

        def crossed() -> int:
            return sum(int((statistics / name).read_text()) for name in ("rx_bytes", "tx_bytes"))

        length = sky.compute(len)
        before = crossed()
        assert length(b"x" * size) @ on_ray.pool == [size] * 3
        sent = crossed()
        assert sent - before < 1.05 * size
        kept = sky.compute(lambda: b"y" * size)().keep() >> on_ray.pool.node(1)
        assert length(kept) @ on_ray.pool == [size] * 3
        assert crossed() - sent < 1 << 20
        before, parts = crossed(), [bytes([number]) * (size // 3) for number in range(3)]
        assert sky.compute(lambda data: [part[0] for part in sky.shard(data)])(parts) @ on_ray.pool == [[0], [1], [2]]
        shared = b"z" * size  # as joblib's batches share an array
        assert [future.result(60) for future in [length(shared) > on_ray.pool for _ in range(12)]] == [size] * 12
        assert crossed() - before < 2 * 1.05 * size

    def test_user_processes_know_nothing_of_ray(self, on_ray: OnRay) -> None:
        @sky.compute
        def known() -> list[str]:
            names = [name for name in os.environ if name.startswith("RAY_")]
            return [*names, *(["ray"] if importlib.util.find_spec("ray") else [])]

        assert known() @ on_ray.pool == [[], [], []]

    def test_secrets_are_in_files_of_this_user_alone(self, on_ray: OnRay) -> None:
        host = on_ray.place.hosts[1]
        (token,) = host.run("find", "/tmp", "-name", "token").stdout.split()
        modes = host.run("stat", "-c", "%a", token, token.replace("token", "node.key"), os.path.dirname(token)).stdout
        assert modes.split() == ["600", "600", "700"]
        secret = host.read(token).strip()
        assert len(secret) == 64
        assert not [process for process in host.processes() if secret in process.command]

    def test_no_port_of_ray_answers_one_without_certificate_or_token(self, on_ray: OnRay) -> None:
        for host in on_ray.place.hosts[:2]:
            listening = host.run("ss", "-tlnpH").stdout.splitlines()
            ports = [int(line.split()[3].rpartition(":")[2]) for line in listening if "sshd" not in line]
            assert len(ports) >= 4
            for port in ports:
                assert answer_of(host.address, port, is_encrypted=False) in ("", "HTTP/1.1 401 Unauthorized"), listening
                assert answer_of(host.address, port, is_encrypted=True) == "", listening

    def test_ray_tells_another_host_nothing_without_the_certificate_or_the_token(self, on_ray: OnRay) -> None:
        host, (raylet, *_) = on_ray.place.hosts[2], ray_processes(on_ray.place.hosts[2], "raylet/raylet")
        command = Path(f"/proc/{raylet}/cmdline").read_text().replace("\0", " ")
        address = re.findall(r"--gcs-address=(\S+)", command)[0]
        python = re.findall(r"(\S+/bin/python3?) ", command)[0].rpartition("=")[2]
        known = Path(f"/proc/{raylet}/environ").read_text().split("\0")
        rights = dict(entry.split("=", 1) for entry in known if entry.startswith(("RAY_TLS_", "RAY_AUTH_")))
        ask = f"from ray._raylet import GcsClient; print(GcsClient(address={address!r}).cluster_id)"

        def asks(limit_s: int = 3, **changed: str) -> bool:
            told = {"RAY_py_gcs_connect_timeout_s": str(limit_s), "RAY_USE_TLS": "1", **rights, **changed}
            words = [f"{name}={value}" for name, value in told.items() if value]
            return host.run("env", *words, python, "-c", ask, check=False).returncode == 0

        host.write("/root/other-token", "0" * 64)
        assert asks(30)
        assert not asks(RAY_USE_TLS="0")
        assert not asks(RAY_AUTH_TOKEN_PATH="/root/other-token")
        assert not asks(RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN_PATH="")

    def test_a_node_that_the_client_cannot_reach_takes_calls_and_names_a_lost_slot(self, on_ray: OnRay) -> None:
        until(lambda: on_ray.pool.engine == "ray", within_s=LIMIT_S)
        host, node = on_ray.place.hosts[1], on_ray.pool.node(1)
        host.hide_from(on_ray.place.bed.address)
        try:
            assert where() >> node == host.name
            with pytest.raises(SlotLost):
                sky.compute(lambda: os.kill(os.getpid(), signal.SIGKILL))() >> node
            assert where() >> node == host.name
            assert on_ray.pool.engine == "ray"
        finally:
            host.show_to_all()

    def test_calls_go_on_when_the_head_cannot_reach_a_node(self, on_ray: OnRay) -> None:
        on_ray.begin_calls()
        first, host = on_ray.place.hosts[:2]
        host.hide_from(first.address)
        try:
            until(lambda: on_ray.pool.engine == "direct", within_s=LIMIT_S)
            assert where() @ on_ray.pool == [host.name for host in on_ray.place.hosts]
        finally:
            host.show_to_all()
        until(lambda: on_ray.pool.engine == "ray", within_s=LIMIT_S)
        on_ray.end_calls()

    def test_calls_go_on_after_the_head_was_cut_off_and_the_ports_of_the_next_ray_are_taken(
        self, on_ray: OnRay, ledger_of: Callable[[Place], Ledger]
    ) -> None:
        until(lambda: on_ray.pool.engine == "ray", within_s=LIMIT_S)
        first, other = on_ray.place.hosts[:2]
        ledger = ledger_of(on_ray.place)
        on_ray.begin_calls()
        futures = {n: ledger.submit(noted(ledger.path, 0.25)(n) > on_ray.pool, n) for n in range(90)}
        until(lambda: len(ledger.ran()) > 12)
        with first.link_cut():
            time.sleep(CUT_S)
        with ports_taken(other) as taken:  # Ray is started there again, and then on other ports
            assert ledger.settle(futures) == {}
            until(lambda: taken, within_s=LIMIT_S)
        assert set(ledger.ran().values()) == {1}
        until(lambda: on_ray.pool.engine == "ray", within_s=LIMIT_S)
        on_ray.end_calls()

    def test_another_ray_is_raised_when_the_head_cannot_read_a_key(self, on_ray: OnRay) -> None:
        until(lambda: on_ray.pool.engine == "ray", within_s=LIMIT_S)
        on_ray.begin_calls()
        first, told = on_ray.place.hosts[0], len(on_ray.events)
        remove_key(first)
        kill_of_ray(first, "ray.driver")
        until(lambda: [e for e in on_ray.events[told:] if isinstance(e, sky.events.EngineLost)], within_s=LIMIT_S)
        (lost,) = [event for event in on_ray.events[told:] if isinstance(event, sky.events.EngineLost)]
        assert lost.reason.endswith("node.key: cannot be read (no such file or directory)")
        assert where() @ on_ray.pool == [host.name for host in on_ray.place.hosts]
        until(lambda: on_ray.pool.engine == "ray", within_s=LIMIT_S)
        on_ray.end_calls()

    @pytest.mark.parametrize(
        "victims",
        [
            pytest.param([(1, "ray::Bridge")], id="a bridge"),
            pytest.param([(0, "ray.driver")], id="the driver"),
            pytest.param([(1, "/raylet/raylet"), (2, "ray::DashboardAgent")], id="a raylet and an agent of Ray"),
        ],
    )
    def test_calls_go_on_when_processes_of_ray_die(self, on_ray: OnRay, victims: list[tuple[int, str]]) -> None:
        until(lambda: on_ray.pool.engine == "ray", within_s=LIMIT_S)
        on_ray.begin_calls()
        for node, name in victims:
            kill_of_ray(on_ray.place.hosts[node], name)
        until(lambda: on_ray.pool.engine == "direct", within_s=LIMIT_S)
        assert where() @ on_ray.pool == [host.name for host in on_ray.place.hosts]
        until(lambda: on_ray.pool.engine == "ray", within_s=LIMIT_S)
        on_ray.end_calls()

    def test_a_gang_goes_on_while_ray_cannot_come_back(self, on_ray: OnRay) -> None:
        train_without_ray(on_ray, 0.0)

    def test_nothing_is_lost_doubled_or_left_under_random_faults(
        self, on_ray: OnRay, ledger_of: Callable[[Place], Ledger], tmp_path: Path
    ) -> None:
        until(lambda: on_ray.pool.engine == "ray", within_s=LIMIT_S)
        weights = {kind: weight for kind, weight in RAY_WEIGHTS.items() if kind != "kill master"}  # it may be another's
        ledger, seed = ledger_of(on_ray.place), seeds([SEED])[0]
        chaos = Chaos(on_ray.pool, on_ray.place, ledger, tmp_path, seed=seed, weights=weights)
        chaos.strike(CHAOS_S)
        chaos.check()


def train_without_ray(on_ray: OnRay, away_s: float) -> None:
    """Train a gang on all nodes while Ray is away for that long, and until two starts of it have failed.

    A stand-in for its package notes the starts.
    """

    def train(path: str) -> int:
        steps, together, is_over = sky.counter("steps"), sky.barrier("step", 3), sky.event("over")
        while True:
            steps.increment()
            if os.path.exists(path):
                is_over.set()
            together.wait(timeout_s=60)
            if is_over.is_set():
                return int(steps)
            together.wait(timeout_s=60)
            time.sleep(0.05)

    pool, first, path = on_ray.pool, on_ray.place.hosts[0], f"/root/go-{time.monotonic_ns()}"
    until(lambda: pool.engine == "ray", within_s=LIMIT_S)
    outcome = gang_of(train).with_options(nodes=3)(path) > pool
    steps = pool.counter("steps")
    until(lambda: int(steps) > 9)
    (gcs,) = [process.command for process in first.processes() if "gcs_server" in process.command]
    package = gcs.partition("/core/")[0]
    first.run("mv", package, f"{package}.away")
    first.write(f"{package}/__init__.py", STAND_IN)
    try:
        kill_of_ray(first, "gcs_server")
        time.sleep(away_s)
        until(lambda: first.path(TRIED).exists() and len(first.read(TRIED)) > 1, within_s=LIMIT_S)
        assert pool.engine == "direct"
        before = int(steps)
        until(lambda: int(steps) > before + 9)
        assert where() @ pool == [host.name for host in on_ray.place.hosts]
    finally:
        first.run("rm", "-rf", package, TRIED)
        first.run("mv", f"{package}.away", package)
    until(lambda: pool.engine == "ray", within_s=LIMIT_S)
    time.sleep(away_s / 3)
    first.write(path, "")
    assert outcome.result(60) == [int(steps)] * 3


def remove_key(host: Host) -> None:
    """Remove the key of Ray on a host."""
    (key,) = host.run("find", "/tmp", "-name", "node.key").stdout.split()
    host.run("rm", key)


@contextlib.contextmanager
def ports_taken(host: Host) -> Iterator[list[str]]:
    """Let another program on a host take the ports of the agents of the next Ray that starts there, before they do."""
    taken: list[str] = []
    command = [*host.command_inside(), "python3", "-c", TAKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as taker:
        assert taker.stdin is not None
        assert taker.stdout is not None
        output = taker.stdout
        reader = threading.Thread(target=lambda: taken.extend(output))
        reader.start()
        try:
            yield taken
        finally:
            taker.stdin.close()
            reader.join()


def kill_of_ray(host: Host, name: str) -> None:
    found = ray_processes(host, name)
    assert found, f"{host.name} has no {name}"
    for pid in found:
        with contextlib.suppress(ProcessLookupError):  # it may end with another of them
            os.kill(pid, signal.SIGKILL)


def answer_of(address: str, port: int, *, is_encrypted: bool) -> str:
    """Return the first line of a port's answer to somebody without certificate and token."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        contextlib.suppress(OSError),
        socket.create_connection((address, port), timeout=2.0) as plain,
        context.wrap_socket(plain) if is_encrypted else plain as sock,
    ):
        sock.sendall(b"POST /get_or_create_runtime_env HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        return sock.recv(4096).split(b"\r\n")[0].decode(errors="replace")
    return ""


PROGRAM = """
import sys, time
import skyward as sky

hosts, config, index = sys.argv[1:]
provider = sky.SSH(hosts=hosts.split(), config_file=config, lease_s=600)
told = lambda event: isinstance(event, sky.events.EngineUp) and print("up", flush=True)
options = dict(nodes=2, image=sky.Image(pip_index_url=index), engine="ray", logs=False, on_event=told)
with sky.ComputePool(provider, **options) as one, sky.ComputePool(provider, **options) as other:
    sys.stdin.readline()
    print(*(sky.compute(abs)(-1) @ pool for pool in (one, other)), one.engine, other.engine, flush=True)
    time.sleep(600)
"""


USERS_PROGRAM = """
import ray
ray.init("auto")
print(ray.__version__, len(ray.nodes()), ray.cluster_resources()["mine"])
"""


def test_two_pools_of_a_killed_client_leave_only_the_ray_that_is_the_users_own(
    bed: Bed,
    hosts: Callable[[int], list[Host]],
    ray_index: PackageIndex,
    runtime: Path,
    users_ray: Callable[[int], UsersRay],
) -> None:
    first, other = two = hosts(2)
    mine = users_ray(1)  # in another version
    script = runtime / "client.py"
    script.write_text(PROGRAM)
    client = subprocess.Popen(
        [sys.executable, script, " ".join(host.name for host in two), bed.ssh_config, ray_index.simple],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(runtime), "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    try:
        assert client.stdout.readline() == "up\n"
        mine.start()
        assert client.stdout.readline() == "up\n"
        assert mine.run(first, "-c", USERS_PROGRAM).split() == [USERS_RAY, "1", "1.0"]
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline() == "[1, 1] [1, 1] ray ray\n"
        before = {process.outside_pid for process in first.started_processes()}
        client.kill()
        nothing_runs_on([other])
        until(lambda: {process.outside_pid for process in first.started_processes()} == mine.processes(first))
        assert mine.run(first, "-c", USERS_PROGRAM).split() == [USERS_RAY, "1", "1.0"]
        assert mine.processes(first) <= before, "none of them was started again"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(client.pid, signal.SIGKILL)
        client.wait()
        client.stdin.close()
        client.stdout.close()
        for pid in [pid for found in client_processes(runtime).values() for pid in found]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        mine.stop()
    nothing_runs_on(two)


def test_nodes_that_cannot_connect_are_named_and_a_pool_goes_on_unless_it_needs_ray(
    place: Callable[[int], Place],
) -> None:
    here, events = place(2), list[sky.events.Event]()
    first, other = here.hosts
    other.hide_from(first.address, hides_ports_only=True)
    try:
        options: dict[str, Any] = {"image": here.image, "nodes": 2, "logs": False, "console": False}
        with raised_pool(here.ssh(), on_event=events.append, **options) as pool:
            until(lambda: [event for event in events if isinstance(event, sky.events.EngineLost)], within_s=LIMIT_S)
            assert (where() @ pool, pool.engine) == ([host.name for host in here.hosts], "direct")
        needs = sky.ComputePool(here.ssh(), engine="ray", **options)
        with pytest.raises(UsageError) as refused, needs:
            pass
    finally:
        other.show_to_all()
    assert (refused.value.field, refused.value.value) == ("engine", "ray")
    (lost,) = [event for event in events if isinstance(event, sky.events.EngineLost)]
    cut = rf"node 0 at {first.address} cannot connect to node 1 at {other.address}:\d+ \(no answer\)"
    why = rf"network: {cut}; let the nodes' private addresses reach each other on all ports"
    assert re.fullmatch(why, lost.reason)
    assert re.search(f"engine='ray': Ray did not come up; .*: {why}$", str(refused.value))
    nothing_runs_on(here.hosts)


def test_without_ray_a_pool_that_needs_it_ends_and_another_goes_on(
    place: Callable[[int], Place], capfd: pytest.CaptureFixture[str]
) -> None:
    here, events = place(2), list[sky.events.Event]()  # their index has no Ray
    options: dict[str, Any] = {"image": here.image, "nodes": 2, "logs": False}
    wait = sky.compute(lambda: time.sleep(600))
    needs = sky.ComputePool(here.ssh(), engine="ray", console=False, **options)
    with raised_pool(here.ssh(), console=True, on_event=events.append, **options) as pool:
        with needs, pytest.raises(ProviderError, match=r'(?s)set engine="auto" .* ray was not found'):
            wait() >> needs
        with pytest.raises(ProviderError, match="engine='ray': Ray did not come up"):
            where() >> needs
        until(lambda: [event for event in events if isinstance(event, sky.events.EngineLost)], within_s=LIMIT_S)
        assert (where() @ pool, pool.engine) == ([host.name for host in here.hosts], "direct")
    (lost,) = [event for event in events if isinstance(event, sky.events.EngineLost)]
    assert "ray was not found" in lost.reason
    assert capfd.readouterr().err.count("Ray is not there") == 1
    nothing_runs_on(here.hosts)
