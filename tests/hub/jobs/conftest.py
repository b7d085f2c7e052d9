"""One hub for each module, which the client of the test's process uses."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from skyward import hub
from tests.hub.jobs.hub_process import HubProcess

_VARIABLES = ("URL", "TOKEN", "PROJECT", "EXPERIMENT")


@pytest.fixture(scope="module")
def hub_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    before = {name: os.environ.pop(f"SKYWARD_HUB_{name}", None) for name in _VARIABLES}
    with HubProcess(tmp_path_factory.mktemp("jobs") / "hub") as process:
        os.environ |= {"SKYWARD_HUB_URL": process.url, "SKYWARD_HUB_TOKEN": process.token}
        hub.disconnect()
        yield process
        os.environ |= {f"SKYWARD_HUB_{name}": value for name, value in before.items() if value is not None}
        for name in ("URL", "TOKEN"):
            if before[name] is None:
                del os.environ[f"SKYWARD_HUB_{name}"]
