"""Fixtures for the tests of `make test-gpu`: their device, their time limit, their report.

The tests rely only on pytest, and `run.py` runs them with the configuration beside this file. With the project's
configuration they are not collected.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Literal

import pytest

import skyward as sky

Device = Literal["cuda", "cpu"]
Figures = Callable[[str, object], None]

_CONFIGURATION = Path(__file__).with_name("pytest.ini")
_LIMIT_S = 60.0
_REHEARSAL = 4
"""Times the limit: a processor is slower, and it may be a busy one."""
_LIMIT_IN_C_S = 20.0
"""Further seconds for a main thread that is in C code, where no Python signal handler runs; then stacks are written."""


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if config.inipath == _CONFIGURATION else True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal without a GPU")
    parser.addoption("--results", metavar="FILE", help="gets one line of JSON for each test, as it ends")


class TooLong(Exception):
    """Raised when the test has used up its time."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.config.inipath != _CONFIGURATION:  # pytest asks all conftest files that it has read, for each test
        return (yield)
    marker = item.get_closest_marker("limit")
    limit_s = float(marker.args[0]) if marker else _LIMIT_S
    limit_s *= _REHEARSAL if item.config.getoption("--device") == "cpu" else 1

    def stop(*_: object) -> None:
        raise TooLong(f"not done after {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + _LIMIT_IN_C_S)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    path = item.config.getoption("--results")
    if path and (report.when == "call" or report.outcome != "passed"):
        why = "" if report.outcome == "passed" else str(report.longrepr or "")
        line = {
            "test": item.nodeid.rpartition("/")[2],
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "figures": dict(report.user_properties),
            "why": why[-2000:],
        }
        with open(path, "a") as file:
            file.write(json.dumps(line, default=str) + "\n")
    return report


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Device:
    """Return the device on which the tests compute: "cuda", or "cpu" in a rehearsal."""
    chosen: Device = request.config.getoption("--device")
    return chosen


@pytest.fixture(scope="session")
def count(device: Device) -> int:
    """Return the number of GPUs; 0 in a rehearsal."""
    import torch

    return torch.cuda.device_count() if device == "cuda" else 0


@pytest.fixture
def figures(record_property: Figures) -> Figures:
    """Return a function `figures(name, value)` that puts a number into the report."""
    return record_property


@pytest.fixture(scope="session")
def pool() -> Iterator[sky.ComputePool]:
    """Open a pool of one node with all devices. Its slot and ranks import torch once."""
    with sky.ComputePool(sky.Local()) as pool:
        yield pool


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[sky.ComputePool]:
    """Open a pool of two nodes that divide the devices, or share a single one, which the pool then reports."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="nodes=2: nodes on one machine share")
        pool = sky.ComputePool(sky.Local(), nodes=2).start()
    yield pool
    pool.close()
