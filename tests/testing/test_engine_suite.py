"""The shipped engine suite, on local nodes with both kinds of slots."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import skyward as sky
from skyward.testing import EngineSuite, ProcessEngineSuite


class TestLocalProcesses(ProcessEngineSuite):
    @pytest.fixture
    def pool(self, sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
        return sky_pools(nodes=2, concurrency=2, cancel_grace_s=3, logs=False)


class TestLocalThreads(EngineSuite):
    @pytest.fixture
    def pool(self, sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
        return sky_pools(nodes=2, concurrency=2, executor="thread", logs=False)
