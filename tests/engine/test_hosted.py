"""Pools whose scheduler runs in a head: the shipped engine suites over channels that the client lends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import skyward as sky
from skyward.testing import EngineSuite, ProcessEngineSuite
from tests.engines import hosted_pool


@pytest.fixture(scope="module")
def processes() -> Iterator[sky.ComputePool]:
    with hosted_pool(nodes=2, concurrency=2, cancel_grace_s=3, logs=False) as pool:
        yield pool


class TestProcesses(ProcessEngineSuite):
    @pytest.fixture
    def pool(self, processes: sky.ComputePool) -> sky.ComputePool:
        return processes


@pytest.fixture(scope="module")
def threads() -> Iterator[sky.ComputePool]:
    with hosted_pool(nodes=2, concurrency=2, executor="thread", logs=False) as pool:
        yield pool


@pytest.mark.slow  # beside the suite above it finds little: most of it is the same path
class TestThreads(EngineSuite):
    @pytest.fixture
    def pool(self, threads: sky.ComputePool) -> sky.ComputePool:
        return threads
