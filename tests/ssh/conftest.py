"""Machines for tests of SSH: sshd processes of this user on loopback."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyward.ssh import Connection, HostKeys, SSHTarget, connect
from skyward.ssh.connect import Transport
from tests.ssh.server import Server, needs_sshd


@pytest.fixture(scope="session")
def _folder() -> Iterator[Path]:
    needs_sshd()
    folder = Path(tempfile.mkdtemp(prefix="sky-sshd-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def _shared(_folder: Path) -> Iterator[Server]:
    made = Server(_folder / "shared")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def server(_shared: Server) -> Server:
    """Run one sshd that the tests share, so they leave it unchanged."""
    return _shared


@pytest.fixture
def own_server(_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Make an sshd for this test alone. It is not started yet."""
    made = Server(Path(tempfile.mkdtemp(dir=_folder)))
    yield made
    made.stop()


@pytest.fixture(params=["openssh", "paramiko"])
def transport(request: pytest.FixtureRequest) -> Transport:
    found: Transport = request.param
    if found == "paramiko":
        pytest.importorskip("paramiko")
    return found


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder for connections of this test. It is short because a socket's path must be.

    It comes after `tmp_path`, which pytest makes in the usual folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="sky-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def to(transport: Transport, runtime: Path) -> Iterator[Callable[[SSHTarget], Connection]]:
    """Connect by the transport of the test. The connection is closed after the test."""
    made: list[Connection] = []

    def connected(target: SSHTarget) -> Connection:
        made.append(connect(target, transport=transport))
        return made[-1]

    yield connected
    for connection in made:
        connection.close()


def target_of(server: Server) -> SSHTarget:
    """Return a target with every setting given, so that nothing comes from the user's configuration."""
    return SSHTarget(
        host=server.host,
        port=server.port,
        user=server.user,
        key_file=str(server.key),
        config_file="none",
        host_keys=HostKeys(file=str(server.known_hosts)),
    )
