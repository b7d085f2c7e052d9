"""The fixtures of tests with hosts. `tests/hosts/README.md` says how to use them."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from tests.few_modules import few_modules
from tests.hosts.base import USERS_RAY, base, layers_of_ray, missing
from tests.hosts.bed import Bed
from tests.hosts.ec2 import Ec2
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex, ray_wheels, s3_wheels, torch_wheels, wheels
from tests.hosts.users_ray import UsersRay
from tests.relay import Relay

__all__ = [
    "NewHost",
    "NewRelay",
    "addresses",
    "bed",
    "ec2",
    "ec2_server",
    "hosts",
    "new_host",
    "package_index",
    "pytest_collection_finish",
    "ray_index",
    "relay",
    "require_hosts",
    "s3_index",
    "torch_index",
    "users_ray",
    "why_no_hosts",
]

REQUIRE = "SKYWARD_REQUIRE_HOSTS"
PREPARED: tuple[tuple[str, Callable[[], object]], ...] = (
    ("bed", base),
    ("package_index", wheels),
    ("torch_index", torch_wheels),
    ("torch_index", ray_wheels),
    ("ray_index", ray_wheels),
    ("s3_index", s3_wheels),
    ("s3_index", torch_wheels),
    ("users_ray", layers_of_ray),
)
"""Fixtures and what they download."""
_FIRST_ADDRESS = 10
_LAST_ADDRESS = 62  # from 64 on the addresses belong to EC2


class NewUsersRay(Protocol):
    """Type of the function `users_ray`."""

    def __call__(self, count: int, version: str = USERS_RAY) -> UsersRay: ...


class NewRelay(Protocol):
    """Type of the function `relay`."""

    def __call__(self, host: str, port: int = 22, *, delay_s: float = 0.0, listen: str = "127.0.0.1") -> Relay: ...


class NewHost(Protocol):
    """Type of the function `new_host`."""

    def __call__(self, name: str | None = None, *, ssh_after_s: float = 0.0, **options: Any) -> Host: ...


def why_no_hosts() -> str | None:
    """Return why no hosts can be made here, in words for a user, or None if they can."""
    if sys.platform != "linux":
        return "hosts are made of Linux containers"
    if os.geteuid() != 0:
        return "hosts need root"
    if absent := missing():
        return f"hosts need Debian packages that are not installed: apt-get install {' '.join(absent)}"
    return None


def require_hosts() -> None:
    """Skip the test if there can be no hosts, with the reason, and fail if there must be (`.ci/run`)."""
    why = why_no_hosts()
    if why and os.environ.get(REQUIRE):
        pytest.fail(f"{why}, and {REQUIRE} is set", pytrace=False)
    if why:
        pytest.skip(why)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Do slow preparations before the first test begins, because each test has a time limit."""
    used = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if why_no_hosts() is not None or session.config.option.collectonly:
        return
    for fixture, make in PREPARED:
        if fixture in used:
            make()


@pytest.fixture(scope="session")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Return the network of this session's hosts."""
    require_hosts()
    with Bed.claim() as bed, few_modules(tmp_path_factory.mktemp("config")):
        yield bed


def _free_addresses(bed: Bed) -> Iterator[str]:
    for last in itertools.cycle(range(_FIRST_ADDRESS, _LAST_ADDRESS + 1)):
        address = f"{bed.network}.{last}"
        if address not in {path.read_text() for path in bed.folder.glob("hosts/*/address")}:
            yield address


@pytest.fixture(scope="session")
def addresses(bed: Bed) -> Iterator[str]:
    """Return addresses for further hosts on the bed's network. None of them is in use."""
    return _free_addresses(bed)


@pytest.fixture(scope="session")
def hosts(bed: Bed, addresses: Iterator[str], request: pytest.FixtureRequest) -> Iterator[Callable[[int], list[Host]]]:
    """Return a function `hosts(n)`: the first n hosts of the session, on and reachable.

    They are shared: leave them unchanged.
    """
    made: list[Host] = []
    is_ray_used = any("users_ray" in getattr(item, "fixturenames", ()) for item in request.session.items)
    layers = layers_of_ray() if is_ray_used else []

    def give(count: int) -> list[Host]:
        while len(made) < count:
            made.append(Host(bed, f"node{len(made)}", next(addresses), layers=layers))
        for host in made[:count]:
            if not host.is_on:
                host.start()
            host.restore_link()
        return [host.wait_ssh() for host in made[:count]]

    yield give
    for host in made:
        host.destroy()


@pytest.fixture(scope="module")
def users_ray(hosts: Callable[[int], list[Host]]) -> Iterator[NewUsersRay]:
    """Return a function `users_ray(n)`: a user's Ray that may be started on the first n hosts of the session."""
    made: list[UsersRay] = []

    def give(count: int, version: str = USERS_RAY) -> UsersRay:
        made.append(UsersRay(hosts=hosts(count), version=version))
        return made[-1]

    yield give
    for users_ray in made:
        users_ray.stop()


@pytest.fixture
def new_host(bed: Bed, addresses: Iterator[str]) -> Iterator[NewHost]:
    """Return a function `new_host()`, which starts a host for this test alone. The test may do anything to it."""
    made: list[Host] = []

    def give(name: str | None = None, *, ssh_after_s: float = 0.0, **options: Any) -> Host:
        address = next(addresses)
        host = Host(bed, name or f"host-{address.rpartition('.')[2]}", address, **options)
        made.append(host)
        host.start(ssh_after_s=ssh_after_s)
        return host if ssh_after_s else host.wait_ssh()

    yield give
    for host in made:
        host.destroy()


@pytest.fixture
def relay() -> Iterator[NewRelay]:
    """Return a function `relay(host.address)`, which starts a relay in front of port 22 there.

    Needs no hosts, nor root.
    """
    made: list[Relay] = []

    def give(host: str, port: int = 22, *, delay_s: float = 0.0, listen: str = "127.0.0.1") -> Relay:
        made.append(Relay((host, port), delay_s=delay_s, listen=listen))
        return made[-1]

    yield give
    for relay in made:
        relay.close()


@pytest.fixture(scope="session")
def package_index(bed: Bed) -> Iterator[PackageIndex]:
    """Return an index of wheels for hosts: skyward's dependencies, numpy, joblib and scikit-learn."""
    with contextlib.closing(PackageIndex(bed)) as index:
        yield index


@pytest.fixture(scope="session")
def torch_index(bed: Bed) -> Iterator[PackageIndex]:
    """Return the same index with torch and Ray.

    It is separate, because the first download of torch's wheels takes long.
    """
    with contextlib.closing(PackageIndex(bed, with_torch=True, with_ray=True)) as index:
        yield index


@pytest.fixture(scope="session")
def ray_index(bed: Bed) -> Iterator[PackageIndex]:
    """Return the same index as `package_index` with Ray."""
    with contextlib.closing(PackageIndex(bed, with_ray=True)) as index:
        yield index


@pytest.fixture(scope="session")
def s3_index(bed: Bed) -> Iterator[PackageIndex]:
    """Return the same index with torch and s3fs."""
    with contextlib.closing(PackageIndex(bed, with_torch=True, with_s3=True)) as index:
        yield index


@pytest.fixture(scope="session")
def ec2_server(bed: Bed) -> Iterator[Ec2]:
    """Run the server behind `ec2`."""
    with contextlib.closing(Ec2(bed)) as server:
        yield server


@pytest.fixture
def ec2(ec2_server: Ec2, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ec2]:
    """Return an EC2 without instances and faults. boto3 of this process and of its children finds only this one."""
    for name, value in ec2_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    yield ec2_server
    ec2_server.reset()
