"""Pools on the user's own machines: real sshds on loopback, real agents, environments made there."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.engine.opener import ask_to_end
from skyward.errors import HostKeyUnknown, NoCapacity, ProviderError, Unreachable, UsageError
from skyward.events import Emit, Event, NodeReady, PhaseEnded, PhaseFailed, PoolStarted, ignore
from skyward.providers import load, remote
from skyward.providers.ssh import SSH
from skyward.providers.ssh_host import SSHHost
from skyward.ssh import Connection, SSHResult, SSHTarget
from skyward.ssh.connect import Transport
from skyward.values.machine import Machine, Offer, PoolSpec
from tests.bootstrap.packages import serve
from tests.engines import hosted_pool
from tests.providers.conftest import Hosts
from tests.stand_in_gpus import GPUS, install_smi
from tests.waiting import until

# It travels by value, because this module is not on the nodes.
double = sky.compute(lambda x: 2 * x)
pid = sky.compute(os.getpid)
variables = sky.compute(lambda: dict(os.environ))
folder_of = sky.compute(lambda: os.getcwd().partition("/code")[0])
detach = sky.compute(lambda seconds: subprocess.Popen(["sleep", seconds], start_new_session=True).pid)


# The value ------------------------------------------------------------------------------------------------------------


def test_hosts_are_read_as_ssh_reads_them() -> None:
    provider = SSH(hosts=["gpu1", "me@10.0.0.2:2222", SSHHost(host="gpu3", user="you", key_file="k")], user="all")
    assert [str(target) for target in provider.targets] == ["all@gpu1", "me@10.0.0.2:2222", "you@gpu3"]
    assert provider.targets[2].key_file == "k"
    others = SSH(hosts=["fd00::2", "me@[fe80::1%eth0]:2222", "ssh://me@gpu4:2222", "me@corp@gpu5"], key_file=Path("k"))
    assert [str(t) for t in others.targets] == ["fd00::2", "me@[fe80::1%eth0]:2222", "me@gpu4:2222", "me@corp@gpu5"]
    assert SSHTarget.from_json(others.targets[1].to_json()) == others.targets[1]  # as its processes are told


def test_hosts_may_be_tables_of_a_configuration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("skyward.toml").write_text(
        '[providers.lab]\ntype = "ssh"\nhosts = ["gpu1", { host = "gpu2", port = 2222 }]\nuser = "me"\n'
        'key_file = "~/.ssh/lab"\n'
        '[pools.train]\nprovider = "lab"\nnodes = 2\n'
    )
    pool = sky.ComputePool.named("train")
    assert isinstance(pool.provider, SSH)
    assert [str(target) for target in pool.provider.targets] == ["me@gpu1", "me@gpu2:2222"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hosts": []}, "SSH.hosts"),
        ({"hosts": "gpu1"}, "SSH.hosts"),
        ({"hosts": ["a b"]}, "SSH.hosts"),
        ({"hosts": ["-oProxyCommand=x"]}, "SSH.hosts='-oProxyCommand=x': not a host"),
        ({"hosts": ["gpu1,gpu2"]}, "SSH.hosts='gpu1,gpu2': not a host"),
        ({"hosts": ["me@"]}, "SSH.hosts='me@': not a host"),
        ({"hosts": ["ssh://me:s3cret@gpu1"]}, "SSH.hosts: a password is in the host of 'me', and logins go by keys"),
        ({"hosts": ["gpu1:99999"]}, "SSH.hosts='gpu1:99999': no TCP port is 99999; write one"),
        ({"hosts": ["[::1]:0"]}, "SSH.hosts='.*': no TCP port is 0"),
        ({"hosts": [{"host": "gpu1", "port": "22"}]}, "SSHHost.port='22'"),
        ({"hosts": [{"host": "me@gpu1"}]}, "SSHHost.host='me@gpu1': must be a name .* user="),
        ({"hosts": [{"host": "gpu1:22"}]}, "SSHHost.host='gpu1:22': must be a name .* port="),
        ({"hosts": [{"host": None}]}, "SSHHost.host=None"),
        ({"hosts": [{"host": "gpu1", "private_address": "gpu1.lan"}]}, "SSHHost.private_address='gpu1.lan'"),
        ({"hosts": ["gpu1"], "user": ""}, "SSH.user=''"),
        ({"hosts": ["gpu1", "gpu1"]}, "twice"),
        ({"hosts": [{"name": "gpu1"}]}, "SSH.hosts"),
        ({"hosts": ["gpu1"], "lease_s": 0}, "SSH.lease_s"),
        ({"hosts": ["gpu1"], "transport": "telnet"}, "SSH.transport"),
        ({"hosts": ["gpu1"], "host_keys": "off"}, "SSH.host_keys"),
        ({"hosts": ["gpu1"], "port": 70000}, "SSH.port"),
        ({"hosts": ["gpu1"], "port": "22"}, "SSH.port"),
        ({"hosts": ["gpu1"], "key_file": 5}, "SSH.key_file"),
        ({"hosts": ["gpu1"], "host_keys": 5}, "SSH.host_keys"),
        ({"hosts": ["gpu1"], "host_keys": ["AAAA"]}, "SSH.host_keys"),
        ({"hosts": ["gpu1"], "lease_s": math.inf}, "SSH.lease_s"),
        ({"hosts": ["a:b:22"]}, "IPv6 address"),
    ],
)
def test_an_illegal_field_is_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        SSH(**fields)  # type: ignore[arg-type]


def test_more_nodes_than_hosts_is_no_capacity() -> None:
    with pytest.raises(NoCapacity, match=r"the 1 host \(gpu1\)"):
        SSH(hosts=["gpu1"]).offers(PoolSpec(nodes=2))
    with pytest.raises(NoCapacity, match=r"nodes=3.*2 hosts \(gpu1, gpu2\)"):
        SSH(hosts=["gpu1", "gpu2"]).offers(PoolSpec(nodes=3))


def test_the_provider_is_registered() -> None:
    assert load("ssh") is SSH
    assert sky.SSH is SSH


# Pools ----------------------------------------------------------------------------------------------------------------


def agents_of(hosts: Hosts) -> dict[int, str]:
    """Return the command lines of all processes started from the hosts' environments."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if str(hosts.cache) in command:
                found[int(name)] = Path(f"/proc/{name}/stat").read_text().split()[2] + " " + command
    return found


def folders_of(pool: str) -> list[Path]:
    """Return the folders of its nodes. Other tests may have some of theirs there."""
    return list(Path(f"/tmp/skyward-{os.getuid()}").glob(f"{pool}*"))


def started_name(events: list[Event]) -> str:
    return next(event.pool for event in events if isinstance(event, PoolStarted))


def test_calls_maps_and_streams_work(sshds: Hosts, transport: Transport) -> None:
    @sky.compute
    def count(limit: int) -> Iterator[int]:
        yield from range(limit)

    with sky.ComputePool(provider=sshds.ssh(transport=transport), nodes=2, engine="direct", concurrency=2) as pool:
        assert double(21) >> pool == 42
        assert double(21) @ pool == [42, 42]
        assert pool.map(double, range(1000)) == [2 * x for x in range(1000)]
        assert list(count(100) >> pool) == list(range(100))
        assert sky.compute(len)(b"x" * 3_000_000) >> pool == 3_000_000
        with pytest.raises(ZeroDivisionError):
            sky.compute(lambda: 1 / 0)() >> pool
    until(lambda: not agents_of(sshds))


def test_nothing_is_left_behind_except_the_cache(sshds: Hosts, runtime: Path) -> None:
    with sky.ComputePool(provider=sshds.ssh(), nodes=2, engine="direct") as pool:
        folder = Path(folder_of() >> pool)
        assert folder.stat().st_mode & 0o077 == 0
        assert (folder / "agent.log").stat().st_mode & 0o077 == 0
        detached = detach("631.5") >> pool
        assert double(1) >> pool == 2
    assert not Path(f"/proc/{detached}").exists()
    assert not folder.exists()
    until(lambda: not agents_of(sshds))  # a shell that was to lead the keeper to an agent that is gone
    until(lambda: not [server for server in sshds.servers if server.sessions()])
    assert not list(runtime.glob("skyward-ssh-*/*"))


def test_hosts_that_are_ready_make_a_pool_without_any_work_on_them(sshds: Hosts) -> None:
    with sky.ComputePool(provider=sshds.ssh(), nodes=2, engine="direct"):
        pass
    events: list[Event] = []
    with sky.ComputePool(provider=sshds.ssh(), nodes=2, engine="direct", on_event=events.append) as pool:
        assert double(1) >> pool == 2
    ended = [event for event in events if isinstance(event, PhaseEnded)]
    ready = [(event.node, event.phase) for event in ended if event.was_ready]
    assert sorted(ready) == sorted(itertools.product(range(2), ("code", "packages", "python", "skyward")))
    # The rest takes 2 s on an idle machine: connections, a look at the hosts and the agents.
    assert {event.phase for event in ended if not event.was_ready} == {"connect", "probe", "agent"}


def test_nothing_secret_is_in_an_argv_or_the_log(sshds: Hosts) -> None:
    image = sky.Image(env={"MY_TOKEN": "s3cr3t-value"})
    with sky.ComputePool(provider=sshds.ssh("host0"), nodes=1, image=image) as pool:
        assert (variables() >> pool)["MY_TOKEN"] == "s3cr3t-value"
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                assert b"s3cr3t-value" not in Path(f"/proc/{name}/cmdline").read_bytes()
        folder = Path(folder_of() >> pool)
        assert "s3cr3t-value" not in (folder / "agent.log").read_text()


def test_slots_and_calls_of_a_host_divide_its_gpus(sshds: Hosts, tmp_path: Path) -> None:
    image = sky.Image(env={"PATH": install_smi(tmp_path, GPUS)})
    events: list[Event] = []

    def visible(folder: str, me: int) -> tuple[str, list[int]]:
        import time  # it travels by value

        Path(folder, str(me)).touch()
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
        info = sky.instance_info()
        own = [device.index for device in info.devices] if info is not None else []  # pytest rewrites assertions
        return os.environ["CUDA_VISIBLE_DEVICES"], own

    met = tmp_path / "met"
    met.mkdir()
    ssh = sshds.ssh("host0")
    with sky.ComputePool(provider=ssh, nodes=1, concurrency=2, image=image, on_event=events.append) as pool:
        calls = [sky.compute(visible)(str(met), me) > pool for me in range(2)]
        answers = sorted(call.result(60) for call in calls)
        three = sky.compute(visible).with_options(gpus=3)
        both = [three(str(met), me) > pool for me in (3, 4)]
        booked = sorted(call.result(60)[1] for call in both)
        with pytest.raises(sky.errors.UsageError, match="no node can ever hold 9 GPUs"):
            three.with_options(gpus=9)(str(met), 5) >> pool
    assert (tmp_path / "looks").read_text().count("\n") == 1, "a search takes seconds on a machine with many GPUs"
    assert booked == [[0, 1, 2], [3, 4, 5]]
    assert answers == [("0,1,2,3", [0, 1, 2, 3]), ("4,5,6,7", [4, 5, 6, 7])]
    (ready,) = (event for event in events if isinstance(event, NodeReady))
    assert ready.devices == "8x NVIDIA H100 80GB HBM3"


def test_two_pools_share_a_host(sshds: Hosts) -> None:
    with (
        sky.ComputePool(provider=sshds.ssh("host0"), nodes=1) as one,
        sky.ComputePool(provider=sshds.ssh("host0"), nodes=1) as two,
    ):
        assert (pid() >> one) != (pid() >> two)
        one.close()
        assert double(4) >> two == 8


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sky.Image]:
    """Return an image with a package that refers to this environment's packages, because torch is slow to install."""
    folder = tmp_path_factory.mktemp("index")
    (torch,) = importlib.util.find_spec("torch").submodule_search_locations  # type: ignore[union-attr,misc]
    info = "bridge-1.0.dist-info"
    with zipfile.ZipFile(folder / "bridge-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("bridge.pth", f"{Path(torch).parent}\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: bridge\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in (*archive.namelist(), f"{info}/RECORD")))
    with serve(folder) as index:
        yield sky.Image(pip=["bridge"], pip_extra_index_url=index.url)


@pytest.mark.timeout(240)
def test_a_gang_trains_over_two_hosts(sshds: Hosts, bridge: sky.Image) -> None:
    @sky.compute
    @sky.integrations.torch(backend="gloo")
    def train(steps: int) -> tuple[int, int, float]:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.full((8, 4), float(dist.get_rank() + 1))
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
        return dist.get_rank(), dist.get_world_size(), float(next(model.parameters()).sum())

    with sky.ComputePool(provider=sshds.ssh(), nodes=2, engine="direct", image=bridge) as pool:
        (rank0, world0, weights0), (rank1, world1, weights1) = train(5) @ pool
    assert (rank0, rank1, world0, world1) == (0, 1, 2, 2)
    assert weights0 == weights1


# Failures at the start ------------------------------------------------------------------------------------------------


def test_a_host_that_does_not_answer_is_named_and_nothing_is_left(sshds: Hosts) -> None:
    sshds.servers[1].stop()
    events: list[Event] = []
    with pytest.raises(Unreachable, match=r"host1.*\(tried for 15 s\)"):
        # The other host answers within that time, also on a busy machine.
        sky.ComputePool(
            provider=sshds.ssh(), nodes=2, engine="direct", provision_timeout_s=15.0, on_event=events.append
        ).start()
    until(lambda: not agents_of(sshds), within_s=20)  # earlier than by the lease
    assert not folders_of(started_name(events))


def test_a_spare_host_replaces_one_that_does_not_answer(sshds: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    # No option: only tests wait for nobody. The spare host answers within that time, also on a busy machine.
    monkeypatch.setattr("skyward.providers.ssh._CONNECT_S", 15.0)
    sshds.servers[0].stop()
    with sky.ComputePool(provider=sshds.ssh(), nodes=1) as pool:
        assert double(21) >> pool == 42


def test_a_spare_host_replaces_one_that_hangs(sshds: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    run, hung = Connection.run, list[str]()

    def hang(self: Connection, command: str, *, timeout_s: float, **options: Any) -> SSHResult:
        if str(self.target) == str(sshds.ssh().targets[0]) and "sys.exit(start())" in command:
            hung.append(command)
            command, timeout_s = "sleep 60", 1.0
        return run(self, command, timeout_s=timeout_s, **options)

    monkeypatch.setattr(Connection, "run", hang)
    with sky.ComputePool(provider=sshds.ssh(), nodes=1) as pool:
        assert double(21) >> pool == 42
    assert len(hung) == 1
    hung.clear()
    hangs = r"host0.*: node 0: its agent hangs: ssh .*host0.*: no end within 1 s; log in there, and see what it waits"
    with pytest.raises(Unreachable, match=hangs) as caught, sky.ComputePool(provider=sshds.ssh("host0"), nodes=1):
        pass
    assert caught.value.retryable
    assert len(hung) == 1, "a command that hangs is no lost connection"


def test_a_node_that_another_process_has_launched_returns_to_its_host(sshds: Hosts) -> None:
    provider, pool = sshds.ssh("host0", "host1"), "train-1f2e3d4c"
    places = [
        {"node": node, "place": {"target": asdict(target)}} for node, target in enumerate(reversed(provider.targets))
    ]
    provider.resume(pool, json.loads(json.dumps(places)))
    machines = provider.launch(PoolSpec(nodes=2), [], pool, [1], ignore)
    ask_to_end(machines, 5.0)
    provider.terminate(machines)
    assert [machine.handle.place.target for machine in machines] == [provider.targets[0]], "the other host has node 0"


def test_an_unknown_host_key_stops_the_pool_with_advice(sshds: Hosts, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(sshds.config.read_text().replace("known_hosts", "no_known_hosts"))
    with pytest.raises(HostKeyUnknown, match="make it known: echo"):
        sky.ComputePool(provider=SSH(hosts=["host0"], config_file=str(config)), nodes=1).start()


def test_a_host_that_is_too_small_is_no_capacity(sshds: Hosts) -> None:
    lacks = r"vcpus=4096, but the machine has \d+ cores; accelerator=64x H100 80GB, but the machine has "
    wanted = sky.accelerators.H100(count=64)
    with pytest.raises(NoCapacity, match=lacks):
        sky.ComputePool(provider=sshds.ssh("host0"), nodes=1, vcpus=4096, accelerator=wanted).start()
    until(lambda: not agents_of(sshds), within_s=20)  # earlier than by the lease


def test_an_agent_that_does_not_start_shows_its_output(sshds: Hosts) -> None:
    pool = f"pool-{'x' * 120}"  # a socket's path has 108 bytes at most
    provider = sshds.ssh("host0")
    with pytest.raises(ProviderError, match="AF_UNIX path too long"):
        provider.launch(PoolSpec(nodes=1), [], pool, [0], ignore)
    until(lambda: not agents_of(sshds), within_s=20)  # earlier than by the lease
    assert not folders_of(pool)


PROGRAM = """
import os, sys, signal
import skyward as sky
from skyward.events import PoolStarted
signal.signal(signal.SIGINT, signal.default_int_handler)

def say(text):
    os.write(1, f"{text}\\n".encode())  # whole lines, from whichever thread

def told(event):
    if isinstance(event, PoolStarted):
        say(event.pool)
    say((type(event).__name__ + " " + getattr(event, "phase", "")).strip())

@sky.compute
def hang():
    import time
    print("hanging", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    with sky.ComputePool(
        provider=sky.SSH(hosts=["host0", "host1"], config_file=sys.argv[1], lease_s=float(sys.argv[2])),
        nodes=2, engine="direct", on_event=told, logs=lambda line: say(line.text),
    ) as pool:
        say("open")
        hang() @ pool
"""


@contextlib.contextmanager
def client(hosts: Hosts, folder: Path, lease_s: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    path = folder / "client.py"
    path.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(path), str(hosts.config), str(lease_s)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def says(process: subprocess.Popen[str], wanted: str) -> str:
    """Return the first line that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(wanted):
            return line.strip()
    pytest.fail(f"it ended and never said {wanted!r}")


@dataclass(frozen=True, kw_only=True)
class Late(SSH):
    """Provider whose nodes are there so late that the lease of the first has ended."""

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        machines = super().launch(spec, offers, pool, nodes, emit)
        until(lambda: not os.path.exists(machines[0].folder))
        return machines


@pytest.mark.parametrize("opened", [sky.ComputePool, hosted_pool])
def test_lease_that_ends_before_the_pool_is_open_is_named(
    sshds: Hosts, runtime: Path, opened: Callable[[SSH], sky.ComputePool]
) -> None:
    pool = opened(Late(hosts=["host0"], config_file=str(sshds.config), lease_s=3.0))
    # On a busy machine, the lease ends before the agent has started.
    with pytest.raises((Unreachable, ProviderError), match=r"lease_s=3: nobody .*; set a longer"):
        pool.start()


@pytest.mark.parametrize(
    "phase", ["PhaseStarted connect", "PhaseStarted probe", "PhaseStarted agent", "open", "hanging"]
)
def test_ctrl_c_at_any_time_leaves_nothing(sshds: Hosts, tmp_path: Path, phase: str) -> None:
    with client(sshds, tmp_path) as process:
        pool = says(process, "pool-")
        says(process, phase)
        os.killpg(process.pid, signal.SIGINT)
        threading.Thread(target=process.communicate, daemon=True).start()
        assert process.wait(60) != 0
    until(lambda: not agents_of(sshds))
    until(lambda: not folders_of(pool))


def test_a_killed_client_leaves_nothing(sshds: Hosts, tmp_path: Path) -> None:
    with client(sshds, tmp_path) as process:
        pool = says(process, "pool-")
        says(process, "hanging")
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    until(lambda: not agents_of(sshds))
    until(lambda: not folders_of(pool))
    until(lambda: not [server for server in sshds.servers if server.sessions()])


# Failures while it runs -----------------------------------------------------------------------------------------------


def test_a_cut_connection_is_reopened_and_nothing_is_lost(sshds: Hosts, transport: Transport) -> None:
    @sky.compute
    def slow(seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    with sky.ComputePool(provider=sshds.ssh(transport=transport), nodes=2, engine="direct") as pool:
        first = pid() @ pool
        futures = [slow(3) > pool for _ in range(2)]
        until(lambda: len(sshds.servers[0].sessions()) > 0)
        for server in sshds.servers:
            server.drop_connections()
        assert sorted(future.result(60) for future in futures) == sorted(first)
        assert pid() @ pool == first


def test_an_agent_that_dies_alone_is_replaced(sshds: Hosts) -> None:
    events: list[Event] = []
    with sky.ComputePool(provider=sshds.ssh(), nodes=2, engine="direct", on_event=events.append) as pool:
        first = pid() @ pool
        os.kill(pool.agent_pids()[1], signal.SIGKILL)
        until(lambda: any(type(event).__name__ == "NodeLost" for event in events))
        until(lambda: sorted(pool.agent_pids()) == [0, 1], 60)
        assert (pid() @ pool)[1] != first[1]
    until(lambda: not agents_of(sshds))


def test_killed_connection_processes_are_replaced_and_nothing_is_lost(
    sshds: Hosts, transport: Transport, runtime: Path
) -> None:
    @sky.compute
    def slow(seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    def holders() -> list[int]:
        names = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
        return [int(name) for name in names if str(runtime) in _command_line(name)]

    with sky.ComputePool(provider=sshds.ssh(transport=transport), nodes=2, engine="direct") as pool:
        first = pid() @ pool
        futures = [slow(3) > pool for _ in range(2)]
        for process in holders():
            with contextlib.suppress(ProcessLookupError):  # it ended with the one before
                os.kill(process, signal.SIGKILL)
        assert sorted(future.result(60) for future in futures) == sorted(first)
        assert pid() @ pool == first
    until(lambda: not holders())


def _command_line(process: str) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_a_rented_machine_whose_watchdog_never_starts_is_not_used(sshds: Hosts, runtime: Path, tmp_path: Path) -> None:
    places = [sshds.ssh(sshds.names[0])._places[0]]  # a rented place without a cloud that rents it
    events: list[Event] = []
    missing = str(tmp_path / "lease")
    with pytest.raises(ProviderError, match=f"watchdog.* did not start: {missing} is missing after 6 s.*cloud-init"):
        remote.bring_up(places, PoolSpec(), "mine", [0], events.append, lease_s=60, lease_file=missing, connect_s=6.0)
    assert next(event.reason for event in events if isinstance(event, PhaseFailed)).startswith("host0")
