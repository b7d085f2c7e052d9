"""The driver's process, as the head keeps it. A small program stands in for the driver."""

from __future__ import annotations

from pathlib import Path

from skyward.engine.ray.driving import DriverOrder, RayDriver
from skyward.engine.ray.links import RayWays
from skyward.engine.ray.settings import FILES
from tests.waiting import until


class Ways(RayWays):
    """Ways that only note where the driver listens."""

    def __init__(self) -> None:
        super().__init__(lambda _: None, lambda _: None)  # type: ignore[arg-type,return-value]
        self.stood = list[str]()

    def stands(self, path: str) -> None:
        self.stood.append(path)


def test_a_driver_that_cannot_read_its_key_is_not_started_and_the_file_is_named(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_text("secret")
    python, key = tmp_path / "python", tmp_path / "node.key"
    python.write_text("#!/bin/sh\nread order\necho listens\nexec sleep 600\n")
    python.chmod(0o755)
    order = DriverOrder(python=str(python), folder=str(tmp_path), here="", address="", pool="")
    ways, lost = Ways(), list[str]()
    driver = RayDriver(ways, lambda folder, why: lost.append(f"{folder}: {why}"))
    try:
        driver.start(order)
        until(lambda: len(ways.stood) == 1)
        key.unlink()
        key.mkdir()  # the user of these tests may read every file
        driver.start(order)
        until(lambda: lost)
        assert lost == [f"{tmp_path}: {key}: cannot be read (is a directory)"]
        assert len(ways.stood) == 1
    finally:
        driver.stop()
