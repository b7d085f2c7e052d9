"""The driver's process, as the head keeps it. A small program stands in for the driver."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.engine.ray.driving import DriverOrder, RayDriver
from skyward.engine.ray.links import RayWays
from skyward.engine.ray.settings import FILES
from tests.engine.parts import machine
from tests.waiting import until


class Ways(RayWays):
    """Ways that only note where the driver listens."""

    def __init__(self) -> None:
        super().__init__(lambda _: None, lambda _: None)  # type: ignore[arg-type,return-value]
        self.stood = list[str]()

    def stands(self, path: str) -> None:
        self.stood.append(path)


class Kept:
    """A driver that is kept, with a shell script in its place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in FILES:
            (folder / name).write_text("secret")
        self.ways, self.lost = Ways(), list[str]()
        self._driver = RayDriver(self.ways, self._on_lost)

    def start(self, script: str) -> None:
        python = self.folder.parent / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        self._driver.start(DriverOrder(python=str(python), folder=str(self.folder), here="", address="", pool=""))

    def _on_lost(self, folder: str, why: str) -> None:
        self.ways.is_lost()
        self.lost.append(f"{folder}: {why}")

    def stop(self) -> None:
        self._driver.stop()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path / "ray")
    yield kept
    kept.stop()


def test_a_driver_that_cannot_read_its_key_is_not_started_and_the_file_is_named(kept: Kept) -> None:
    kept.start("read order; echo listens; exec sleep 600")
    until(lambda: len(kept.ways.stood) == 1)
    key = kept.folder / "node.key"
    key.unlink()
    key.mkdir()  # the user of these tests may read every file
    kept.start("read order; echo listens; exec sleep 600")
    until(lambda: kept.lost)
    assert kept.lost == [f"{kept.folder}: {key}: cannot be read (is a directory)"]
    assert len(kept.ways.stood) == 1


def test_nobody_waits_for_a_driver_whose_ray_has_ended(kept: Kept) -> None:
    kept.start(f"read order; touch {kept.folder}/begun; exec sleep 600")
    until((kept.folder / "begun").exists)
    shutil.rmtree(kept.folder)
    until(lambda: kept.lost, within_s=20.0)  # not as long as a driver may take to listen
    assert kept.lost == [f"{kept.folder}: Ray on the head's machine has ended"]
    kept.ways.await_ready([machine(1)], 600.0)
