"""A pool that replaces another: two never exist by mistake."""

from __future__ import annotations

import pytest

import skyward as sky
from skyward.errors import NoCapacity, UsageError


def test_a_second_open_pool_of_the_same_name_is_refused_and_affects_nobody() -> None:
    with sky.ComputePool(sky.Local(), name="twice", logs=False) as pool:
        second = sky.ComputePool(sky.Local(), name="twice", logs=False)
        with pytest.raises(UsageError, match="name='twice': another pool of that name is open in this process"):
            second.start()
        assert sky.compute(abs)(-1) >> pool == 1
    with second:  # once the first is closed, the name is free
        assert sky.compute(abs)(-2) >> second == 2


def test_unnamed_pools_never_clash() -> None:
    with sky.ComputePool(sky.Local(), logs=False) as one, sky.ComputePool(sky.Local(), logs=False) as two:
        assert [sky.compute(abs)(-1) >> pool for pool in (one, two)] == [1, 1]


def test_a_pool_that_failed_to_start_holds_no_name() -> None:
    broken = sky.ComputePool(sky.Local(), vcpus=100_000, name="once", logs=False)
    with pytest.raises(NoCapacity):
        broken.start()
    with sky.ComputePool(sky.Local(), name="once", logs=False) as pool:
        assert sky.compute(abs)(-1) >> pool == 1
