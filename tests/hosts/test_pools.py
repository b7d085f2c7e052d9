"""Pools on the hosts of the test bed: what users run, on machines of their own and on rented ones, and what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import NodeError, ProviderError, SkywardError
from tests.hosts.bed import ROOT, Bed
from tests.hosts.ec2 import Ec2
from tests.hosts.fixtures import NewHost
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(300)]

# By value, for this module is not on the nodes.
where = sky.compute(lambda: os.uname().nodename)
wait = sky.compute(lambda seconds: (threading.Event().wait(seconds), os.uname().nodename)[1])
double = sky.compute(lambda x: (threading.Event().wait(0.05), 2 * x)[1])
stubborn = sky.compute(retries=3)(lambda x: (threading.Event().wait(0.05), 2 * x)[1])
size = sky.compute(len)


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals, prices and built wheels of these tests alone."""
    folder = tmp_path_factory.getbasetemp()
    for name in ("state", "cache", "config"):
        (folder / name).mkdir(exist_ok=True)
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(folder / name))


@pytest.fixture
def image(package_index: PackageIndex) -> sky.Image:
    return sky.Image(pip_index_url=package_index.simple)


@pytest.fixture
def aws(ec2: Ec2) -> sky.AWS:
    return sky.AWS(region="us-east-1", client_cidr=ec2.client_cidr, lease_s=60)


def own(hosts: list[Host], bed: Bed, *, lease_s: float = 60.0) -> sky.SSH:
    return sky.SSH(hosts=[host.name for host in hosts], config_file=str(bed.ssh_config), lease_s=lease_s)


# Machines of one's own ------------------------------------------------------------------------------------------------


def test_hosts_of_ones_own_are_as_before_afterwards(
    hosts: Callable[[int], list[Host]], bed: Bed, image: sky.Image
) -> None:
    three = hosts(3)
    with sky.ComputePool(own(three, bed), nodes=3, image=image) as pool:
        assert sorted(where() @ pool) == ["node0", "node1", "node2"]
    for host in three:
        until(lambda host=host: host.started_processes() == [])  # type: ignore[misc]
        written = [path for path in host.changed_files() if not path.startswith(("/root/.cache/", "/root/.ssh/"))]
        assert not [path for path in written if "sky" in path], "only a cache of environments stays"


def test_a_host_that_loses_its_power_is_lost_and_the_others_go_on(
    new_host: NewHost, bed: Bed, image: sky.Image
) -> None:
    pair = [new_host(), new_host()]
    with sky.ComputePool(own(pair, bed, lease_s=10), nodes=2, image=image) as pool:
        futures = [wait(3.0) > pool, wait(3.0) > pool]
        until(lambda: all(future.running() for future in futures))
        pair[0].power_loss()
        ended: list[str] = []
        for future in futures:
            try:
                ended.append(future.result(timeout=200))
            except NodeError as error:
                ended.append(type(error).__name__)
        assert sorted(ended) == sorted([pair[1].name, "NodeLost"])
    until(lambda: pair[1].started_processes() == [])


@pytest.mark.parametrize("part", ["agent.main", "slot.zygote", "agent/attach.py"])
def test_whatever_of_ours_is_killed_on_a_host_no_call_is_lost(
    new_host: NewHost, bed: Bed, image: sky.Image, part: str
) -> None:
    host = new_host()
    with sky.ComputePool(own([host], bed), nodes=1, concurrency=2, image=image) as pool:
        assert double(1) >> pool == 2
        for which in range(2):  # there are two of each: agent and watchdog, zygote and slot, those of client and keeper
            calls = [stubborn(n) > pool for n in range(60)]
            until(lambda calls=calls: any(call.done() for call in calls))  # type: ignore[misc]
            victims = [process for process in host.started_processes() if part in process.command]
            host.run("kill", "-9", f"{victims[which % len(victims)].pid}")
            assert [call.result(timeout=120) for call in calls] == [2 * n for n in range(60)]
    until(lambda: host.started_processes() == [])


@pytest.mark.parametrize("seconds", [5, 60])
def test_a_link_that_is_cut_for_a_while_loses_nothing(
    new_host: NewHost, bed: Bed, image: sky.Image, seconds: int
) -> None:
    host = new_host()
    with sky.ComputePool(own([host], bed, lease_s=150), nodes=1, concurrency=2, image=image) as pool:
        calls = [double(n) > pool for n in range(200)]  # 5 s of work
        until(lambda: any(call.done() for call in calls))
        with host.link_cut():
            threading.Event().wait(seconds)
        assert [call.result(timeout=120) for call in calls] == [2 * n for n in range(200)]
    until(lambda: host.started_processes() == [])


def test_a_link_that_stays_cut_is_a_lost_node_and_the_host_tidies_up(
    new_host: NewHost, bed: Bed, image: sky.Image
) -> None:
    host = new_host()
    pool = sky.ComputePool(own([host], bed, lease_s=10), nodes=1, image=image, provision_timeout_s=20).start()
    try:
        call = wait(600) > pool
        until(call.running)
        host.cut_link()
        with pytest.raises((NodeError, ProviderError)):
            call.result(timeout=120)
        until(lambda: host.started_processes() == [], within_s=30)
    finally:
        pool.close()


@pytest.mark.parametrize("full", ["/", "/tmp", "/dev/shm"])
def test_a_disk_that_fills_up_hangs_nothing(new_host: NewHost, bed: Bed, image: sky.Image, full: str) -> None:
    host = new_host()
    with sky.ComputePool(own([host], bed), nodes=1, image=image) as pool:
        assert double(1) >> pool == 2
        with host.disk_full(full):
            call = size(bytes(8 << 20)) > pool
            try:
                assert call.result(timeout=60) == 8 << 20
            except SkywardError as error:
                said = str(error)
            else:
                said = "No space left: it was not needed"
            assert "No space left" in said
        assert size(bytes(8 << 20)) >> pool == 8 << 20


def test_a_wrong_clock_there_harms_nothing(new_host: NewHost, bed: Bed, image: sky.Image) -> None:
    host = new_host()
    host.set_clock(-3 * 365 * 86400)
    with sky.ComputePool(own([host], bed, lease_s=10), nodes=1, image=image) as pool:
        assert wait(12) >> pool == host.name  # longer than the lease
    until(lambda: host.started_processes() == [])


# Rented machines ------------------------------------------------------------------------------------------------------


def test_rented_machines_come_although_the_api_is_unwell_and_nothing_stays(
    ec2: Ec2, aws: sky.AWS, image: sky.Image
) -> None:
    ec2.set(list_after_s=2.0, pending_s=1.0, refuses_terminate_while_pending=True)
    ec2.throttle("RunInstances", times=1)
    ec2.has_no_capacity(times=2)
    ec2.fail("RunInstances", "InternalError", status=500, is_done=True)
    with sky.ComputePool(aws, nodes=2, vcpus=2, allocation="spot-if-available", image=image) as pool:
        names = sorted(where() @ pool)
        assert names == sorted(machine.name for machine in ec2.machines("running"))
    assert ec2.left() == []
    assert len(ec2.machines()) == 2, "none was made twice"


def test_machines_whose_boot_never_ends_are_given_back(ec2: Ec2, aws: sky.AWS, image: sky.Image) -> None:
    ec2.set(boots="never")
    pool = sky.ComputePool(aws, nodes=2, vcpus=2, image=image, provision_timeout_s=10)
    with pytest.raises(SkywardError):
        pool.start()
    assert ec2.left() == []
    assert len(ec2.machines("terminated")) == 2


def test_a_rented_machine_that_loses_its_power_is_lost_and_ended(ec2: Ec2, aws: sky.AWS, image: sky.Image) -> None:
    with sky.ComputePool(aws, nodes=1, vcpus=2, image=image) as pool:
        (machine,) = ec2.machines("running")
        future = wait(600) > pool
        until(future.running)
        ec2.host(machine.id).power_loss()
        with pytest.raises((NodeError, ProviderError)):
            future.result(timeout=200)
    assert ec2.left() == []


MARK = "SKYWARD_TEST_MARK"
CLIENT = """
import sys, os, time
import skyward as sky
with sky.ComputePool({provider}, nodes=2, vcpus=2, image=sky.Image(pip_index_url="{index}")) as pool:
    (sky.compute(os.getpid)() @ pool)
    print("ready", flush=True)
    time.sleep(600)
"""


def _client(aws: sky.AWS, index: PackageIndex, tmp_path: Path) -> subprocess.Popen[str]:
    provider = f"sky.AWS(region='us-east-1', client_cidr={aws.client_cidr!r}, lease_s=60)"
    script = tmp_path / "client.py"
    script.write_text(CLIENT.format(provider=provider, index=index.simple))
    client = subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT), MARK: tmp_path.name},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert client.stdout is not None
    said = []
    while line := client.stdout.readline():
        said.append(line)
        if line == "ready\n":
            return client
    raise AssertionError("".join(said))


def test_when_the_client_is_killed_the_machines_end(
    ec2: Ec2, aws: sky.AWS, package_index: PackageIndex, tmp_path: Path
) -> None:
    with _client(aws, package_index, tmp_path) as client:
        assert len(ec2.machines("running")) == 2
        client.kill()
    until(lambda: ec2.left() == [], within_s=60)
    until(lambda: _marked(tmp_path.name) == [])


def test_when_everything_here_is_killed_the_machines_end_by_themselves(
    ec2: Ec2, aws: sky.AWS, package_index: PackageIndex, tmp_path: Path
) -> None:
    with _client(aws, package_index, tmp_path):
        for pid in _marked(tmp_path.name):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not ec2.machines("pending", "running"), within_s=120)
    subprocess.run([sys.executable, "-m", "skyward", "gc"], cwd=ROOT, check=True, capture_output=True, timeout=60)
    assert ec2.left() == []


def _marked(mark: str) -> list[int]:
    """The processes of this machine that inherited the mark, however they detached themselves."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and f"{MARK}={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes().split(
                b"\0"
            ):
                found.append(int(entry))
    return found
