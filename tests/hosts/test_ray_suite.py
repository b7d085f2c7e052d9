"""The shipped engine suite on two hosts: the scheduler is in a head, and Ray carries the links."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.testing import EngineSuite
from tests.engines import raised_pool
from tests.hosts.bed import Bed
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 120.0
"""Longest wait for Ray on a busy machine. It stands within 20 s on a free one."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Return a folder that this machine and the hosts share."""
    with tempfile.TemporaryDirectory(prefix="skyward-suite-", dir="/srv") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def pool(bed: Bed, addresses: Iterator[str], ray_index: PackageIndex, folder: Path) -> Iterator[sky.ComputePool]:
    hosts = [Host(bed, f"suite{number}", next(addresses), shared=[folder]) for number in range(2)]
    try:
        for host in hosts:
            host.start()
        provider = sky.SSH(hosts=[host.wait_ssh().name for host in hosts], config_file=bed.ssh_config)
        image = sky.Image(pip=["pytest"], pip_index_url=ray_index.simple)  # the suite's module imports it
        with raised_pool(provider, nodes=2, concurrency=2, cancel_grace_s=0.3, image=image, logs=False) as pool:
            until(lambda: pool.engine == "ray", within_s=LIMIT_S)
            yield pool
            until(lambda: pool.engine == "ray", within_s=LIMIT_S)
    finally:
        for host in hosts:
            host.destroy()


class TestOnRay(EngineSuite):
    @pytest.fixture
    def shared(self, folder: Path) -> Path:
        return Path(tempfile.mkdtemp(dir=folder))
