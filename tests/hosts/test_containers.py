"""Pools whose nodes run in containers: a real podman behind a real sshd."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import ProviderError, UsageError
from tests.hosts.containers import IMAGE, Podman, software_of_podman
from tests.hosts.ec2 import Ec2
from tests.hosts.faults import ray_processes
from tests.hosts.index import PackageIndex
from tests.hosts.registry import serve_image
from tests.providers.conftest import Hosts
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

root_of = sky.compute(lambda: sorted(os.listdir("/")))
keep = sky.compute(lambda text: Path("/kept/text").write_text(text))


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    folder = Path(tempfile.mkdtemp(prefix="sky-pod-", dir="/tmp"))
    try:
        made = Podman(folder)
        made.make_image()
        yield made
        assert made.containers() == []
    finally:
        subprocess.run(["umount", "-l", folder / "images" / "overlay"], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def host(podman: Podman) -> Iterator[Hosts]:
    folder = Path(tempfile.mkdtemp(prefix="sky-hosts-", dir="/tmp"))
    made = Hosts(folder, 1, environment=podman.options)
    yield made
    made.stop()
    shutil.rmtree(folder)


def test_calls_run_in_the_container_and_it_ends_with_the_pool(host: Hosts, podman: Podman) -> None:
    image = sky.Image(container=IMAGE)
    with sky.ComputePool(host.ssh(), image=image, volumes={"/kept": sky.Volume("kept")}) as pool:
        there = root_of() >> pool
        keep("by the container") >> pool
        assert "mnt" not in there
        assert set(there) >= {"bin", "proc", "tmp", "kept"}
        (name,) = podman("ps", "--format", "{{.Names}}").split()
        assert name.startswith("skyward-")
    assert podman.containers() == []
    assert (host.data / "skyward/volumes/kept/text").read_text() == "by the container"
    assert not os.path.lexists("/kept"), "the link is in the container"


def parents_and_agent(container: str) -> list[int]:
    """Return standby, watchdog and agent of the node in a container."""
    marked = subprocess.run(
        ["grep", "-slF", f"SKYWARD_NODE={container.removeprefix('skyward-')}", *glob.glob("/proc/[0-9]*/environ")],
        capture_output=True,
        text=True,
        check=False,
    )
    pids = sorted(int(path.split("/")[2]) for path in marked.stdout.split())
    mains = [pid for pid in pids if b"skyward.node.agent.main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(mains) == 3
    return mains


CLIENT = """
import sys, skyward as sky
hosts = sky.SSH(hosts=["host0"], config_file=sys.argv[1])
with sky.ComputePool(hosts, image=sky.Image(container=sys.argv[2])) as pool:
    print((sky.compute(lambda: 7))() >> pool, flush=True)
    (sky.compute(lambda: __import__("signal").pause()))() >> pool
"""


def test_a_killed_client_leaves_no_container(host: Hosts, podman: Podman) -> None:
    client = subprocess.Popen([sys.executable, "-c", CLIENT, host.config, IMAGE], stdout=subprocess.PIPE)
    with client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == b"7\n"
            assert len(podman.containers()) == 1
        finally:
            client.kill()
    until(lambda: podman.containers() == [], within_s=60)


DETACHED = """
import sys, time, skyward as sky
hosts, image = sky.SSH(hosts=["host0"], config_file=sys.argv[1]), sky.Image(container=sys.argv[2])
pool = sky.ComputePool(
    hosts, image=image, name="boxed", detached_for_s=float(sys.argv[3]), concurrency=2, logs=False, console=False
).start()
futures = [sky.compute(lambda number: time.sleep(3) or number)(number) > pool for number in range(2)]
while not all(future.running() for future in futures):
    time.sleep(0.01)
print("sent", flush=True)
time.sleep(600)
"""


def kill_program_with_detached_pool(host: Hosts, for_s: float) -> None:
    command = [sys.executable, "-c", DETACHED, str(host.config), IMAGE, str(for_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == b"sent\n"
        finally:
            client.kill()


def test_a_detached_pool_outlives_its_program_and_its_head_the_agent(
    host: Hosts, podman: Podman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    kill_program_with_detached_pool(host, 600.0)
    pool = sky.ComputePool.attach("boxed", logs=False, console=False)
    first, second = pool.calls()
    assert pool.future(first).result(60) == 0
    until(lambda: all(call.state == "done" for call in pool.calls()))
    assert "mnt" not in root_of() >> pool
    pool.detach()
    (name,) = podman("ps", "--format", "{{.Names}}").split()
    agent = parents_and_agent(name)[-1]
    os.kill(agent, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{agent}"))
    with sky.ComputePool.attach("boxed", logs=False, console=False) as pool:
        assert pool.future(second).result(60) == 1, "the head keeps the values, and its container goes on"
    until(lambda: podman.containers() == [])
    with pytest.raises(UsageError, match=r"'boxed'.* ended on .*, because its program closed it"):
        sky.ComputePool.attach("boxed")


def test_a_detached_pool_that_has_ended_with_its_container_says_why(
    host: Hosts, podman: Podman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    kill_program_with_detached_pool(host, 1.0)
    until(lambda: podman.containers() == [])
    with pytest.raises(UsageError, match=r"'boxed'.* ended on .*, because no client came for 1\.0 s"):
        sky.ComputePool.attach("boxed")
    assert podman.containers() == []


@pytest.mark.parametrize("index", range(3), ids=["standby", "watchdog", "agent"])
def test_a_killed_process_of_the_agent_leaves_no_container(host: Hosts, podman: Podman, index: int) -> None:
    with sky.ComputePool(host.ssh(), image=sky.Image(container=IMAGE)) as pool:
        root_of() >> pool
        (name,) = podman("ps", "--format", "{{.Names}}").split()
        os.kill(parents_and_agent(name)[index], signal.SIGKILL)
        until(lambda: name not in podman("ps", "-a", "--format", "{{.Names}}").split(), within_s=60)


def test_an_image_that_cannot_be_pulled_is_named(host: Hosts, podman: Podman) -> None:
    with (
        pytest.raises(ProviderError, match=r"Image.container='localhost/none:1': podman cannot pull it: .*; log in"),
        sky.ComputePool(host.ssh(), image=sky.Image(container="localhost/none:1")),
    ):
        pass
    assert podman.containers() == []


@pytest.mark.parametrize(
    ("lacks", "words"),
    [("tar", "`tar` is missing; .* in the image"), ("sh", "its sh cannot be run .*; use")],
)
def test_an_image_that_lacks_a_program_is_refused(host: Hosts, podman: Podman, lacks: str, words: str) -> None:
    name = f"localhost/without-{lacks}:1"
    if lacks == "sh":
        podman.make_image(name, parts=("etc/passwd",))
    else:
        podman.make_image(name, without=lacks)
    pool = sky.ComputePool(host.ssh(), image=sky.Image(container=name))
    with pytest.raises(sky.errors.SkywardError, match=words), pool:
        pass
    assert podman.containers() == []


@pytest.mark.timeout(600)
def test_ranks_of_torch_in_two_containers_meet(podman: Podman, torch_index: PackageIndex) -> None:
    @sky.compute
    @sky.integrations.torch(backend="gloo", returns="ranks")
    def sum_of_ranks() -> tuple[int, float, bool]:
        import torch
        import torch.distributed as dist

        value = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(value)
        return dist.get_rank(), value.item(), "mnt" in os.listdir("/")

    folder = Path(tempfile.mkdtemp(prefix="sky-hosts-", dir="/tmp"))
    two = Hosts(folder, 2, environment=podman.options)
    image = sky.Image(container=IMAGE, pip=[f"torch=={version('torch')}"], pip_index_url=torch_index.simple)
    try:
        with sky.ComputePool(two.ssh(), nodes=2, image=image, provision_timeout_s=500) as pool:
            assert len(podman.containers()) == 2
            assert sum_of_ranks() @ pool == [(0, 3.0, False), (1, 3.0, False)]
    finally:
        two.stop()
        shutil.rmtree(folder)
    assert podman.containers() == []


@pytest.mark.timeout(400)
def test_ray_joins_containers_on_rented_machines(
    podman: Podman, ec2: Ec2, ray_index: PackageIndex, tmp_path: Path
) -> None:
    podman.save(tmp_path / "image")
    with serve_image(tmp_path / "image", ec2.bed.address) as registry:
        software_of_podman(tmp_path / "software.tar", registry=registry)
        ec2.set(software=str(tmp_path / "software.tar"))
        image = sky.Image(container=f"{registry}/skyward-test:1", pip_index_url=ray_index.simple)
        provider = sky.AWS(instance_types=["m5.large"], client_cidr=ec2.client_cidr)
        with sky.ComputePool(provider, nodes=2, image=image, engine="ray") as pool:
            there = sky.compute(lambda: ("mnt" in os.listdir("/"), os.getuid() != 0, "RAY_ADDRESS" in os.environ))
            assert there() @ pool == [(False, True, False)] * 2
            until(lambda: pool.engine == "ray", within_s=120)
            assert there() @ pool == [(False, True, False)] * 2
            for machine in ec2.machines("running"):
                raylets = ray_processes(ec2.host(machine.id), "/raylet/raylet")
                assert raylets != []
                assert not any(os.path.exists(f"/proc/{pid}/root/mnt") for pid in raylets), "it is in the container"
    assert ec2.left() == []
