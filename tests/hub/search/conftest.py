"""One hub and one pool for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import skyward as sky
from skyward import hub
from skyward.testing.hub import HubServer
from tests.few_modules import lean_frameworks


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    with HubServer(folder / "data") as server:
        hub.connect(server.url, token=server.token, spool=folder / "spool")
        yield server
        hub.disconnect()


@pytest.fixture(scope="module")
def pool(server: HubServer) -> Iterator[sky.ComputePool]:
    with lean_frameworks(), sky.ComputePool(provider=sky.Local(), nodes=2, logs=False, console=False) as pool:
        yield pool
