"""Mappings of large arguments: the next call gets them, unless somebody wrote to them or still uses them."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyward.node.slot.mappings import LEAST_BYTES, LentBlob, Mappings
from skyward.wire.blobs import Blob

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="the kernel tells no written pages")

LENGTH = LEAST_BYTES // 8
DIGEST = bytes(16)


@pytest.fixture(params=[1, 5], ids=["small-pages", "huge-pages"])
def length(request: pytest.FixtureRequest) -> int:
    """Return the length of an array that is mapped in one way or the other."""
    times: int = request.param
    return times * LENGTH


def blob(length: int) -> Blob:
    return Blob.unnamed(memoryview(np.arange(length, dtype=np.float64).data).cast("B"), DIGEST)


def array_of(lent: Blob | LentBlob) -> Any:
    return np.frombuffer(lent.map(), dtype=np.float64)


def call(mappings: Mappings, length: int, *, write: bool = False, leave: bool = False) -> tuple[int, Any]:
    """Read the whole array as a call does. Return its address, and the array if it is left behind."""
    with mappings.lend((blob(length),)) as (lent,):
        return _run(lent, length, write, leave)


def _run(lent: Blob | LentBlob, length: int, write: bool, leave: bool) -> tuple[int, Any]:
    array = array_of(lent)
    assert array.sum() == length * (length - 1) / 2
    if write:
        array[-1] = 0
    return array.ctypes.data, array if leave else None


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> None:
    """Unmap the shared pages of slots that other tests have left to the garbage collector."""
    gc.collect()


def mapped() -> int:
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:skyward-result") + maps.count("memfd:skyward-kept")


def test_the_next_call_gets_the_mapping_and_no_page_faults(length: int) -> None:
    mappings = Mappings()
    first, _ = call(mappings, length)
    assert [call(mappings, length)[0] for _ in range(3)] == [first] * 3
    assert mapped() == 1
    mappings.drop(DIGEST)
    assert mapped() == 0


def test_nobody_gets_a_mapping_that_was_written(length: int) -> None:
    mappings = Mappings()
    call(mappings, length, write=True)
    assert mapped() == 0
    call(mappings, length)  # checks the content
    call(mappings, length, write=True)
    call(mappings, length)


def test_nobody_gets_a_mapping_that_is_used(length: int) -> None:
    mappings = Mappings()
    _, left = call(mappings, length, leave=True)
    _, other = call(mappings, length, leave=True)
    left[:] = -1
    assert other[1] == 1
    assert call(mappings, length)[0]
    given = blob(length)
    with mappings.lend((given, given)) as (one, same):  # also two calls at once, as threads have them
        first, second = array_of(one), array_of(same)
        first[:] = 5
        assert second[1] == 1
        del first, second
    del left, other, given
    assert mapped() == 1


def test_a_blob_that_is_dropped_meanwhile_is_not_kept(length: int) -> None:
    mappings = Mappings()
    with mappings.lend((blob(length),)) as (lent,):
        array_of(lent)
        mappings.drop(DIGEST)
    assert mapped() == 0


def test_few_mappings_are_kept_and_small_blobs_have_none() -> None:
    mappings = Mappings()
    several = [Blob.kept(memoryview(np.full(LENGTH, float(number)).data)) for number in range(40)]
    for one in several:
        with mappings.lend((one,)) as (lent,):
            array_of(lent)
    assert mapped() == 16
    small = Blob.kept(memoryview(bytes(LEAST_BYTES - 1)))
    with mappings.lend((small,)) as (lent,):
        assert lent is small
