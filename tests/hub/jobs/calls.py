"""Functions that the tests submit. They are in a module of the test's, which has to travel to the hub."""

from __future__ import annotations

import os
import time
from pathlib import Path

import skyward as sky


@sky.compute
def add(first: int, second: int) -> int:
    print(f"adding {first} and {second}", flush=True)
    return first + second


class OwnError(Exception):
    """Class of a module that neither hub nor runner imports."""


@sky.compute
def fail(text: str) -> None:
    raise OwnError(text)


@sky.compute
def node() -> int:
    info = sky.instance_info()
    assert info is not None
    return info.node


@sky.compute
def wait_for(file: str) -> str:
    """Note each run in the file beside `file`, and return once `file` is there."""
    path = Path(file)
    with path.with_suffix(".runs").open("a") as runs:
        runs.write(f"{os.getpid()}\n")
    print("begins", flush=True)
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    print("ends", flush=True)
    return path.read_text()


def runs_of(file: Path) -> list[int]:
    """Return the processes that ran `wait_for(file)`."""
    path = file.with_suffix(".runs")
    return [int(line) for line in path.read_text().split()] if path.exists() else []
