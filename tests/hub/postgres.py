"""A PostgreSQL server for the tests: made in a temporary folder, on loopback, for one session."""

from __future__ import annotations

import getpass
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.hub.http.server_processes import free_port

DEBIAN = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)


def find_program(name: str) -> str | None:
    """Find a program of PostgreSQL on the path, or where Debian's packages put it."""
    return shutil.which(name) or next((str(folder / name) for folder in DEBIAN if (folder / name).exists()), None)


class PostgresServer:
    """A server.

    Args:
        folder: An empty folder for its files.
        is_durable: Whether a commit waits for the disk. Tests never cut the power.
    """

    def __init__(self, folder: Path, *, is_durable: bool = False) -> None:
        self.folder = folder
        self._fsync = "on" if is_durable else "off"
        self.user = "postgres" if os.getuid() == 0 else getpass.getuser()  # it refuses to run as root
        self._account = pwd.getpwnam(self.user)
        self._numbers = itertools.count(1)
        self.port = free_port()  # tests start it again on it
        if os.getuid() == 0:
            os.chown(folder, self._account.pw_uid, self._account.pw_gid)
        self._run("initdb", "-D", self.data, "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync")
        self.start()

    @property
    def data(self) -> str:
        return str(self.folder / "data")

    def start(self) -> None:
        settings = (
            f"-p {self.port} -k {self.folder} -c listen_addresses=127.0.0.1 -c fsync={self._fsync}"
            " -c max_connections=200 -c shared_buffers=32MB"
        )
        self._run("pg_ctl", "-D", self.data, "-o", settings, "-l", str(self.folder / "log"), "-w", "start")

    def stop(self) -> None:
        """End the server as a restart does: open connections are cut."""
        self._run("pg_ctl", "-D", self.data, "-m", "immediate", "-w", "stop")

    def new_database(self, template: str = "template1") -> str:
        """Make a database, by default an empty one, and return its address."""
        name = f"hub{next(self._numbers)}"
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        return self._url(name)

    def drop_database(self, url: str) -> None:
        name = url.rsplit("/", 1)[1]
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _url(self, database: str) -> str:
        return f"postgresql://{self.user}@127.0.0.1:{self.port}/{database}"

    def _run(self, name: str, *arguments: str) -> None:
        program = find_program(name)
        assert program is not None
        subprocess.run(
            [program, *arguments],
            check=True,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            user=self._account.pw_uid if os.getuid() == 0 else None,
            group=self._account.pw_gid if os.getuid() == 0 else None,
            extra_groups=[] if os.getuid() == 0 else None,
            env={**os.environ, "HOME": str(self.folder)},
        )


def run_server() -> Iterator[PostgresServer]:
    """Run a server in a new folder. Skips where PostgreSQL is not installed, except in CI."""
    if find_program("initdb") is None:
        reason = "PostgreSQL is not installed: apt-get install postgresql"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    # Not below pytest's own folder: that is for its user alone, and it tidies away the folders of other sessions.
    with tempfile.TemporaryDirectory(prefix="skyward-postgres-", dir=_place()) as folder:
        server = PostgresServer(Path(folder))
        yield server
        server.stop()


def _place() -> str | None:
    """Return where the files go: into memory if there is room, because each database is 300 files.

    To make and remove one took 0.03 s of processor time in memory, and 0.2 s on a disk.
    """
    memory = Path("/dev/shm")
    has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free >= 2**30
    return str(memory) if has_room else None
