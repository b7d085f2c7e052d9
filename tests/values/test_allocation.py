"""Allocation strategies."""

from __future__ import annotations

from typing import get_args

import pytest

from skyward.errors import UsageError
from skyward.values import allocation
from skyward.values.allocation import AllocationStrategy, validate_allocation
from tests.doctests import run_examples


def test_examples_in_docstrings_run() -> None:
    run_examples(allocation)


def test_each_strategy_is_accepted() -> None:
    names = get_args(AllocationStrategy)
    assert names == ("spot", "on-demand", "spot-if-available", "cheapest")
    assert tuple(map(validate_allocation, names)) == names


@pytest.mark.parametrize("value", ["Spot", "", None, 1])
def test_other_strategies_are_refused_with_the_legal_ones(value: object) -> None:
    with pytest.raises(UsageError, match=r"allocation=.*'spot-if-available'") as refused:
        validate_allocation(value)
    assert refused.value.field == "allocation"
