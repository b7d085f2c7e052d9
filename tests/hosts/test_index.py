"""The package index: hosts that reach nothing else install from it."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from tests.hosts.fixtures import NewHost
from tests.hosts.host import Host
from tests.hosts.index import DEBIAN_PACKAGE, PackageIndex

pytestmark = pytest.mark.hosts


@pytest.fixture
def with_uv(new_host: NewHost) -> Host:
    host = new_host(has_uv=True)
    host.run("uv", "venv", "-q", "--python", "python3", "/opt/env")
    return host


@pytest.mark.parametrize("kind", ["simple", "find_links"])
def test_a_bare_host_installs_wheels(with_uv: Host, package_index: PackageIndex, kind: str) -> None:
    option = {
        "simple": ["--index-url", package_index.simple],
        "find_links": ["--no-index", "--find-links", package_index.find_links],
    }[kind]
    with_uv.run("uv", "pip", "install", "-q", "--python", "/opt/env", *option, "cloudpickle", "xxhash", "numpy")
    assert with_uv.run("/opt/env/bin/python", "-c", "import numpy; print(numpy.ones(3).sum())").stdout == "3.0\n"
    is_compiled = "import numpy, os; print(os.path.exists(numpy.__cached__))"
    assert with_uv.run("/opt/env/bin/python", "-B", "-c", is_compiled).stdout == "True\n"
    assert any(path.endswith(".metadata") for path in package_index.requests()) or kind == "find_links"


def test_a_bare_host_installs_a_debian_package(new_host: NewHost, package_index: PackageIndex) -> None:
    host = new_host()
    host.write("/etc/apt/sources.list", f"{package_index.apt_source}\n")
    host.run("apt-get", "update", "-qq")
    host.run("apt-get", "install", "-y", "-qq", DEBIAN_PACKAGE)
    assert host.ssh(DEBIAN_PACKAGE).stdout == "hello from a package\n"


def test_a_wheel_is_added_for_the_session(package_index: PackageIndex, tmp_path: Path) -> None:
    wheel = tmp_path / "Made_here-1.0-py3-none-any.whl"
    wheel.write_bytes(b"")
    package_index.add(wheel)
    with urllib.request.urlopen(f"{package_index.simple}made-here/") as page:
        assert b"Made_here-1.0-py3-none-any.whl" in page.read()
