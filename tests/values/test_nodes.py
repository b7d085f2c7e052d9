"""Number of nodes as users write it, and the words in which illegal ones are refused."""

from __future__ import annotations

from typing import Any

import pytest

import skyward as sky
from skyward.errors import UsageError
from skyward.values.nodes import Nodes


@pytest.mark.parametrize(
    ("written", "bounds"),
    [
        (4, (4, 4, 4)),
        ((2, 8), (2, 2, 8)),
        ([0, 3], (0, 0, 3)),
        (sky.Nodes(2, 4, 8), (2, 4, 8)),
        (sky.Nodes(min=2, max=8), (2, 2, 8)),
        (sky.Nodes(3), (3, 3, 3)),
        ((2, 2), (2, 2, 2)),
    ],
)
def test_a_number_a_pair_and_bounds_are_legal(written: Any, bounds: tuple[int, int, int]) -> None:
    nodes = Nodes.of(written)
    assert (nodes.min, nodes.start, nodes.max) == bounds
    assert nodes.is_fixed == (nodes.min == nodes.max)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (0, ("nodes=0", "whole number >= 1", "nodes=(0, 4)")),
        (True, ("nodes=True",)),
        ("4", ("nodes='4'",)),
        ((1, 2, 3), ("nodes=(1, 2, 3)", "sky.Nodes(min=2, desired=4, max=8)")),
        ((0, 0), ("nodes.max=0", ">= 1", "set max=1 or more")),
        ((8, 2), ("nodes.min=8", "exceeds max=2", "swap")),
        ((-1, 2), ("nodes.min=-1", ">= 0", "set min=0 or more")),
        ((1, 2.5), ("nodes.max=2.5",)),
    ],
)
def test_an_illegal_number_is_refused_by_name(written: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as refused:
        Nodes.of(written)
    for word in words:
        assert word in str(refused.value)


def test_the_start_lies_between_the_bounds() -> None:
    with pytest.raises(UsageError, match=r"nodes.desired=9: outside min and max; set 2 to 8"):
        sky.Nodes(2, 9, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_idle": "close"}, ("on_idle='close'", "set idle_timeout_s=600")),
        ({"on_idle": "stop"}, ("on_idle='stop'", "'rest', 'close'")),
        ({"idle_timeout_s": 0}, ("idle_timeout_s=0", "> 0")),
        ({"nodes": (0, 2), "roles": {"evaluation": [0]}}, ("roles", "set min=1")),
        ({"nodes": (2, 4), "roles": {"evaluation": [3]}}, ("roles['evaluation']", "nodes 0 to 1")),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as refused:
        sky.ComputePool(sky.Local(), **options)
    for word in words:
        assert word in str(refused.value)
