"""Hubs that the client of the test's process uses: one for all tests, or one of a module's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from skyward import hub
from tests.few_modules import few_modules
from tests.hub.jobs.hub_process import HubProcess

_VARIABLES = ("URL", "TOKEN", "PROJECT", "EXPERIMENT")


@pytest.fixture(scope="session")
def common_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A hub for the session: hub, launcher and first runner take four seconds of processor time to start."""
    folder = tmp_path_factory.mktemp("jobs")
    with few_modules(folder / "config"), HubProcess(folder / "hub") as process:
        yield process


@pytest.fixture(scope="module")
def hub_process(common_hub: HubProcess) -> Iterator[HubProcess]:
    """The hub of all tests. No job waits or runs there at the beginning of a module, and no runner."""
    if common_hub.process.poll() is not None:  # a test failed that had killed it
        common_hub.start()
    with _used(common_hub):
        yield common_hub
        for job in hub.jobs():
            if not job.done():
                job.cancel()
        common_hub.end_runners()
        common_hub.until_clean()


@pytest.fixture(scope="module")
def own_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A hub for the module, which its tests may start again with other variables."""
    folder = tmp_path_factory.mktemp("own")
    with few_modules(folder / "config"), HubProcess(folder / "hub") as process, _used(process):
        yield process


@contextmanager
def _used(process: HubProcess) -> Iterator[None]:
    """Let the client of this process use a hub."""
    before = {name: os.environ.pop(f"SKYWARD_HUB_{name}", None) for name in _VARIABLES}
    os.environ |= {"SKYWARD_HUB_URL": process.url, "SKYWARD_HUB_TOKEN": process.token}
    hub.disconnect()
    try:
        yield
    finally:
        os.environ |= {f"SKYWARD_HUB_{name}": value for name, value in before.items() if value is not None}
        for name in ("URL", "TOKEN"):
            if before[name] is None:
                del os.environ[f"SKYWARD_HUB_{name}"]
