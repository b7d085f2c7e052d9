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


def blob() -> Blob:
    return Blob.unnamed(memoryview(np.arange(LENGTH, dtype=np.float64).data).cast("B"), DIGEST)


def array_of(lent: Blob | LentBlob) -> Any:
    return np.frombuffer(lent.map(), dtype=np.float64)


def call(mappings: Mappings, *, write: bool = False, leave: bool = False) -> tuple[int, Any]:
    """Read the whole array as a call does. Return its address, and the array if it is left behind."""
    with mappings.lend((blob(),)) as (lent,):
        return _run(lent, write, leave)


def _run(lent: Blob | LentBlob, write: bool, leave: bool) -> tuple[int, Any]:
    array = array_of(lent)
    assert array.sum() == LENGTH * (LENGTH - 1) / 2
    if write:
        array[-1] = 0
    return array.ctypes.data, array if leave else None


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> None:
    """Unmap the shared pages of slots that other tests have left to the garbage collector."""
    gc.collect()


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:skyward-")


def test_the_next_call_gets_the_mapping_and_no_page_faults() -> None:
    mappings = Mappings()
    first, _ = call(mappings)
    assert [call(mappings)[0] for _ in range(3)] == [first] * 3
    assert mapped() == 1
    mappings.drop(DIGEST)
    assert mapped() == 0


def test_nobody_gets_a_mapping_that_was_written() -> None:
    mappings = Mappings()
    call(mappings, write=True)
    assert mapped() == 0
    call(mappings)  # checks the content
    call(mappings, write=True)
    call(mappings)


def test_nobody_gets_a_mapping_that_is_used() -> None:
    mappings = Mappings()
    _, left = call(mappings, leave=True)
    _, other = call(mappings, leave=True)
    left[:] = -1
    assert other[1] == 1
    assert call(mappings)[0]
    given = blob()
    with mappings.lend((given, given)) as (one, same):  # also two calls at once, as threads have them
        first, second = array_of(one), array_of(same)
        first[:] = 5
        assert second[1] == 1
        del first, second
    del left, other, given
    assert mapped() == 1


def test_a_blob_that_is_dropped_meanwhile_is_not_kept() -> None:
    mappings = Mappings()
    with mappings.lend((blob(),)) as (lent,):
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
