"""A served hub, and a client that is signed in as its owner."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from skyward.testing.hub import HubServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        yield server


@pytest.fixture
def owner(server: HubServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=server.headers) as client:
        yield client


@pytest.fixture
def stranger(server: HubServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client
