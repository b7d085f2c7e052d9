"""Arrays that are remembered by identity."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from skyward.wire.blobs import Blob
from skyward.wire.payloads import encode
from skyward.wire.seen import SeenArrays

LARGE = (200, 1000)
"""Shape of 1.6 MB of float64."""


class Counting:
    """A `put` that counts how often it hashed a buffer."""

    def __init__(self, min_bytes: int = 1 << 20) -> None:
        self.seen = SeenArrays(min_bytes)
        self.looks = 0

    def put(self, data: memoryview) -> Blob:
        def look(view: memoryview) -> Blob:
            self.looks += 1
            return Blob.snapshot(view)

        return self.seen.put(data, look)

    def send(self, value: Any) -> tuple[bytes, ...]:
        return tuple(blob.digest for blob in encode(value, self.put).blobs)


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_is_hashed_once(order: Any) -> None:
    sending, x = Counting(), np.ones(LARGE, order=order)
    assert sending.send(x) == sending.send({"x": [x]})
    assert sending.looks == 1


def test_two_arrays_are_hashed_separately() -> None:
    sending = Counting()
    ones, twos = np.ones(LARGE), np.full(LARGE, 2.0)
    assert sending.send((ones, twos)) == sending.send(ones) + sending.send(twos)
    assert sending.looks == 2


def test_views_differ_by_their_place_and_size() -> None:
    sending, x = Counting(), np.arange(1_000_000.0)
    digests = {sending.send(view) for view in (x, x[:500_000], x[500_000:], x[1:])}
    assert len(digests) == 4
    assert sending.send(x[500_000:]) in digests
    assert sending.looks == 4


def test_small_arrays_and_other_buffers_are_hashed_each_time() -> None:
    sending = Counting()
    small, text = np.ones(50_000), b"a" * 2_000_000
    for _ in range(2):
        sending.send(small)
        sending.send(text)
    assert sending.looks == 4


def test_an_array_in_the_place_of_a_dead_one_is_another() -> None:
    sending = Counting()
    digests = set()
    for i in range(5):
        x = np.full(LARGE, float(i))  # often where the last one was
        digests.add(sending.send(x))
        del x
        gc.collect()
    assert len(digests) == 5


def test_no_array_is_kept_alive() -> None:
    sending, x = Counting(), np.ones(LARGE)
    sending.send(x)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


def test_a_cleared_memory_hashes_again() -> None:
    sending, x = Counting(), np.ones(LARGE)
    before = sending.send(x)
    x[:] = 3.0
    assert sending.send(x) == before
    sending.seen.clear()
    assert sending.send(x) != before
