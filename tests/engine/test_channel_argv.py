"""Nodes that are reached by a command: the shipped engine suites, and the peculiarities of such links."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import skyward as sky
from skyward.testing import EngineSuite, ProcessEngineSuite
from tests.channels import Relayed


@pytest.fixture(scope="module")
def processes() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(Relayed(), nodes=2, concurrency=2, cancel_grace_s=3, logs=False) as pool:
        yield pool


class TestProcessesByACommand(ProcessEngineSuite):
    @pytest.fixture
    def pool(self, processes: sky.ComputePool) -> sky.ComputePool:
        return processes


@pytest.fixture(scope="module")
def threads() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(Relayed(), nodes=2, concurrency=2, executor="thread", logs=False) as pool:
        yield pool


class TestThreadsByACommand(EngineSuite):
    @pytest.fixture
    def pool(self, threads: sky.ComputePool) -> sky.ComputePool:
        return threads
