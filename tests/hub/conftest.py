"""Databases of the hub's tests: each test that takes `database_url` or `database` runs on SQLite and on PostgreSQL."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.hub.store.database import Database
from skyward.testing.hub import HubServer
from tests.hub import s3 as s3_server
from tests.hub.http.server_processes import ServerProcess, owner_token
from tests.hub.postgres import PostgresServer, run_server
from tests.hub.s3 import S3Server
from tests.waiting import prepare_httpx

prepare_httpx()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One PostgreSQL server for the session."""
    yield from run_server()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """One S3 server for the session."""
    yield from s3_server.run_server()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Address of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/hub.db"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    url = server.new_database()
    yield url
    server.drop_database(url)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the hub's tables, for copies: making the tables costs more than most tests."""
    path = tmp_path_factory.mktemp("template") / "hub.db"
    Database(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="session")
def postgres_template(postgres: PostgresServer) -> str:
    """Name of a database with the hub's tables, for copies."""
    url = postgres.new_database()
    Database(url).close()
    return url.rsplit("/", 1)[1]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database with the hub's tables and first rows, open."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("sqlite_template"), tmp_path / "hub.db")
        database = Database(f"sqlite:///{tmp_path}/hub.db")
        yield database
        database.close()
        return
    template: str = request.getfixturevalue("postgres_template")
    server: PostgresServer = request.getfixturevalue("postgres")
    url = server.new_database(template)
    database = Database(url)
    yield database
    database.close()
    server.drop_database(url)


@pytest.fixture(scope="module")
def sqlite_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and token of a hub on SQLite, for the module."""
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        yield server.url, server.token


@pytest.fixture(scope="module")
def postgresql_hub(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and token of a hub on PostgreSQL, for the module."""
    url = postgres.new_database()
    token = owner_token(url)
    with ServerProcess(url, tmp_path_factory.mktemp("hub")) as server:
        yield server.url, token
    postgres.drop_database(url)
