"""Databases of the hub's tests: each test that takes `database_url` or `database` runs on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.hub.store.database import Database
from tests.hub.postgres import PostgresServer, run_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One PostgreSQL server for the session."""
    yield from run_server()


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


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """An empty database, open."""
    database = Database(database_url)
    yield database
    database.close()
