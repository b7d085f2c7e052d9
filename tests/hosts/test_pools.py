"""Pools on the hosts of the test bed: users' programs, on their own machines and on rented ones, and the leftovers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import skyward as sky
from tests.hosts.bed import Bed
from tests.hosts.ec2 import Ec2
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(300)]

# It travels by value, because this module is not on the nodes.
where = sky.compute(lambda: os.uname().nodename)


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep journals, prices and built wheels of these tests apart."""
    folder = tmp_path_factory.getbasetemp()
    for name in ("state", "cache"):
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


# Users' own machines --------------------------------------------------------------------------------------------------


def test_a_users_own_hosts_are_unchanged_afterwards(
    hosts: Callable[[int], list[Host]], bed: Bed, image: sky.Image
) -> None:
    three = hosts(3)
    with sky.ComputePool(own(three, bed), nodes=3, engine="direct", image=image) as pool:
        assert sorted(where() @ pool) == ["node0", "node1", "node2"]
    for host in three:
        until(lambda host=host: host.started_processes() == [])  # type: ignore[misc]
        written = [path for path in host.changed_files() if not path.startswith(("/root/.cache/", "/root/.ssh/"))]
        assert not [path for path in written if "sky" in path], "only a cache of environments stays"


# Rented machines ------------------------------------------------------------------------------------------------------


def test_rented_machines_come_despite_api_errors_have_ray_and_nothing_stays(
    ec2: Ec2, aws: sky.AWS, ray_index: PackageIndex
) -> None:
    ec2.set(list_after_s=2.0, pending_s=1.0, refuses_terminate_while_pending=True, has_uv=False)
    ec2.throttle("RunInstances", times=1)
    ec2.has_no_capacity(times=2)
    ec2.fail("RunInstances", "InternalError", status=500, is_done=True)
    options: dict[str, Any] = {"vcpus": 2, "allocation": "spot-if-available", "engine": "ray"}
    size, image = sky.Nodes(0, desired=1, max=2), sky.Image(pip_index_url=ray_index.simple)
    dearer = sky.AWS(instance_types=["m5.xlarge"], client_cidr=ec2.client_cidr)
    with sky.ComputePool(any_of=[dearer, aws], nodes=size, image=image, **options) as pool:
        pool.scale(2)
        names = sorted(where() @ pool)
        assert names == sorted(machine.name for machine in ec2.machines("running"))
        until(lambda: pool.engine == "ray", within_s=90)
        assert sorted(where() @ pool) == names
        pool.scale(0)
        until(lambda: not ec2.machines("running"))
        assert (pool.nodes, pool.engine) == (0, "direct"), "its head is here"
    assert ec2.left() == []
    assert len(ec2.machines()) == 2, "none was made twice"
