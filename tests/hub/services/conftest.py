"""The world of jobs, on either database."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.hub.store.folder_blobs import FolderBlobs
from tests.hub.postgres import PostgresServer
from tests.hub.services.jobs.job_world import World


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    server: PostgresServer | None = None
    if getattr(request, "param", "sqlite") == "sqlite":
        shutil.copy(request.getfixturevalue("sqlite_template"), tmp_path / "hub.db")
        url = f"sqlite:///{tmp_path}/hub.db"
    else:
        server = request.getfixturevalue("postgres")
        assert server is not None
        url = server.new_database(request.getfixturevalue("postgres_template"))
    world = World(url, FolderBlobs(tmp_path / "blobs"))
    yield world
    world.do(world.hub.close())
    world.loop.close()
    if server is not None:
        server.drop_database(url)
