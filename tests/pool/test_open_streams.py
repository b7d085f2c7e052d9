"""Streams that are not read to their end, and iterators that raise while they are streamed in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import PoolClosed


@sky.compute
def endless(trace: Path) -> Iterator[int]:
    try:
        yield from itertools.count()
    finally:
        trace.write_text("closed")


@sky.compute
def doubled(values: Iterator[int]) -> Iterator[int]:
    for value in values:
        yield 2 * value


@sky.compute
def total(values: Iterator[int]) -> int:
    return sum(values)


def broken() -> Iterator[int]:
    yield 1
    yield 2
    raise LookupError("of the caller")


def test_a_pool_with_an_unread_stream_can_be_closed(tmp_path: Path) -> None:
    with sky.ComputePool(provider=sky.Local()) as pool:
        stream = endless(tmp_path / "trace") >> pool
        assert next(stream) == 0
    assert (tmp_path / "trace").read_text() == "closed"
    with pytest.raises(PoolClosed, match="'endless': .*before the generator was read to its end"):
        list(stream)


def test_an_error_of_an_iterator_that_is_streamed_in_arrives_unchanged() -> None:
    with sky.ComputePool(provider=sky.Local()) as pool:
        with pytest.raises(LookupError, match="of the caller"):
            total(broken()) >> pool
        read: list[int] = []
        stream = doubled(broken()) >> pool
        with pytest.raises(LookupError, match="of the caller"):
            read.extend(stream)
        assert read == [2, 4]
        assert total(iter([1, 2])) >> pool == 3
