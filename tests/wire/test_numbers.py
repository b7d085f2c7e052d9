"""Lists of numbers as bytes: none changes its type or its value."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.wire.numbers import pack_numbers, unpack_numbers


class Level(IntEnum):
    ONE = 1


class Meters(float):
    pass


INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
ANYTHING = st.one_of(
    INT32,
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(),
    st.binary(),
    st.binary().map(bytearray),
    st.integers(0, 255).map(np.uint8),
    st.floats().map(np.float64),
    st.just(Level.ONE),
    st.floats().map(Meters),
    st.lists(INT32),
)


def bits(value: Any) -> Any:
    return (type(value), value.hex() if type(value) is float and not math.isnan(value) else repr(value))


@given(st.one_of(st.lists(INT32, min_size=1), st.lists(st.floats(), min_size=1)), st.booleans())
def test_numbers_come_back_as_they_were(values: list[Any], is_tuple: bool) -> None:
    packed = tuple(values) if is_tuple else values
    data = pack_numbers(packed)
    assert data is not None
    back = unpack_numbers(data)
    assert type(back) is type(packed)
    assert [bits(v) for v in back] == [bits(v) for v in values]


@given(st.lists(ANYTHING, max_size=8), st.booleans())
def test_other_lists_are_refused_and_never_changed(values: list[Any], has_ends: bool) -> None:
    """Ends that are numbers pass the first check, so the second is reached."""
    values = [7, *values, 7] if has_ends else values
    data = pack_numbers(values)
    are_ints = all(type(v) is int and -(1 << 31) <= v < 1 << 31 for v in values)
    are_numbers = bool(values) and (are_ints or all(type(v) is float for v in values))
    assert (data is not None) == are_numbers
    if data is not None:
        assert [bits(v) for v in unpack_numbers(data)] == [bits(v) for v in values]


@pytest.mark.parametrize("stranger", [True, Level.ONE, np.int64(1), np.int32(1), 1.0, 1 << 31, b"i\0\0\0\0", None, [1]])
def test_one_stranger_among_ints_is_seen(stranger: Any) -> None:
    for at in range(3):
        values: list[Any] = [1, 2]
        values.insert(at, stranger)
        assert pack_numbers(values) is None


@pytest.mark.parametrize("values", [range(3), [], (), "12", b"12", {1: 2}, None, np.arange(3)])
def test_only_lists_and_tuples_with_values_are_packed(values: Any) -> None:
    assert pack_numbers(values) is None
