"""Checks of values that must be numbers within bounds."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from skyward.core.bounds import is_positive


@pytest.mark.parametrize("value", [1, 0.5, Fraction(1, 3)])
def test_finite_numbers_above_zero_are_positive(value: object) -> None:
    assert is_positive(value)


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, True, "1", None, 1j])
def test_other_values_are_not_positive(value: object) -> None:
    assert not is_positive(value, or_zero=True)


def test_zero_counts_only_where_it_is_allowed() -> None:
    assert not is_positive(0)
    assert is_positive(0, or_zero=True)
