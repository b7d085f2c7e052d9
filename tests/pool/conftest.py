"""Fixtures that several tests of pools share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import skyward as sky
from skyward.pool.pool import ComputePool
from tests.engines import engine_of
from tests.waiting import until


@pytest.fixture(scope="module", autouse=True)
def _by_value(by_value: None) -> None: ...


@pytest.fixture(scope="module")
def one_node() -> Iterator[ComputePool]:
    with sky.ComputePool(sky.Local(), nodes=1, concurrency=2) as pool:
        yield pool


@pytest.fixture
def lending_pool(one_node: ComputePool) -> ComputePool:
    """Return a pool of one node where this process and the slots may read each other's memory."""
    until(engine_of(one_node).leader.may_pull)
    return one_node
