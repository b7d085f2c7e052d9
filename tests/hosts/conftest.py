"""Fixtures of the tests of faults on hosts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skyward import hub
from tests.hosts.bed import Bed
from tests.hosts.faults import Ledger, Place
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.hub.jobs.hub_process import HubProcess


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder for connections of this test. It is short because a socket's path must be."""
    folder = Path(tempfile.mkdtemp(prefix="sky-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def place(
    bed: Bed, hosts: Callable[[int], list[Host]], package_index: PackageIndex, runtime: Path
) -> Callable[[int], Place]:
    """Return a function `place(n)`: the first n hosts of the session."""
    return lambda count: Place(bed=bed, index=package_index, hosts=hosts(count))


@pytest.fixture
def hub_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubProcess]:
    """Run a hub with its launcher for one test. It is the hub of the test's own process too."""
    for name in ("STATE", "CACHE"):  # the bed has a config folder
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    with HubProcess(tmp_path / "hub") as process:
        monkeypatch.setenv("SKYWARD_HUB_URL", process.url)
        monkeypatch.setenv("SKYWARD_HUB_TOKEN", process.token)
        hub.disconnect()
        yield process
        hub.disconnect()


@pytest.fixture
def ledger_of() -> Iterator[Callable[[Place], Ledger]]:
    """Return a function `ledger_of(place)`: the books of a test, removed with it."""
    made: list[Ledger] = []

    def give(place: Place) -> Ledger:
        made.append(Ledger(hosts=place.hosts))
        return made[-1]

    yield give
    for ledger in made:
        ledger.clear()
