"""Hosts for fast tests: sshd processes on loopback, which share a cache of environments."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.providers.ssh import SSH
from skyward.ssh.connect import Transport
from tests.few_modules import few_modules
from tests.ssh.server import Server, needs_sshd


class Hosts:
    """Several sshds. Each logs in to this machine, so they share its files and processes."""

    def __init__(self, folder: Path, count: int, *, environment: str = "") -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.data = folder / "data"
        self.servers = [
            Server(
                folder / f"host{n}",
                f"host{n}",
                environment=f"XDG_CACHE_HOME={self.cache} XDG_DATA_HOME={self.data} {environment}",
            )
            for n in range(count)
        ]
        self.config = folder / "ssh_config"
        self.config.write_text("".join(server.config.read_text() for server in self.servers))
        for server in self.servers:
            server.start()

    @property
    def names(self) -> list[str]:
        return [server.name for server in self.servers]

    def ssh(self, *names: str, lease_s: float = 60.0, transport: Transport | None = None) -> SSH:
        """Return a provider of these hosts, by default of all."""
        return SSH(hosts=names or self.names, config_file=str(self.config), lease_s=lease_s, transport=transport)

    def stop(self) -> None:
        for server in self.servers:
            server.stop()


@pytest.fixture(scope="session")
def _shared_hosts() -> Iterator[Hosts]:
    needs_sshd()
    folder = Path(tempfile.mkdtemp(prefix="sky-hosts-", dir="/tmp"))
    made = Hosts(folder, 2)
    with few_modules(folder / "config"):
        yield made
    made.stop()
    shutil.rmtree(folder)


@pytest.fixture
def sshds(_shared_hosts: Hosts) -> Hosts:
    """Run two sshds that are on. Tests leave them so."""
    for server in _shared_hosts.servers:
        if server.process is None:
            server.start()
    return _shared_hosts


@pytest.fixture(params=["openssh", "paramiko"])
def transport(request: pytest.FixtureRequest) -> Transport:
    found: Transport = request.param
    if found == "paramiko":
        pytest.importorskip("paramiko")
    return found


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder for connections of this test. It is short because a socket's path must be."""
    folder = Path(tempfile.mkdtemp(prefix="sky-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    shutil.rmtree(folder)
