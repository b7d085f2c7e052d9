"""MLflow's server beside a hub, and a hub for unchanged clients, for a session of tests."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from skyward.testing.hub import HubServer

from .oracle import Oracle
from .programs import Scripts, mlflow_server


@pytest.fixture(scope="session")
def mlflow_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as url:
        yield url


@pytest.fixture(scope="session")
def scripts() -> Iterator[Scripts]:
    """Run scripts of MLflow's clients."""
    scripts = Scripts()
    yield scripts
    scripts.close()


@pytest.fixture(scope="session")
def hub_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        yield server


@pytest.fixture(scope="session")
def compared_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """A hub that gets the same calls as MLflow's server and no others, so that searches find the same."""
    with HubServer(tmp_path_factory.mktemp("compared")) as server:
        yield server


@pytest.fixture
def oracle(mlflow_url: str, compared_hub: HubServer) -> Iterator[Oracle]:
    with (
        httpx.Client(base_url=mlflow_url, timeout=60) as theirs,
        httpx.Client(base_url=compared_hub.url, headers=compared_hub.headers, timeout=60) as ours,
    ):
        yield Oracle(theirs, ours)
