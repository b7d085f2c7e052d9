"""A frozen map is a read-only, hashable mapping."""

from __future__ import annotations

import pickle

import pytest

from skyward.core import frozenmap
from skyward.core.frozenmap import FrozenMap
from tests.doctests import run_examples


def test_examples_in_docstrings_run() -> None:
    run_examples(frozenmap)


def test_equal_items_are_equal_and_hash_alike_in_any_order() -> None:
    one, other = FrozenMap({"a": 1, "b": 2}), FrozenMap([("b", 2), ("a", 1)])
    assert one == other == {"a": 1, "b": 2}
    assert len({one, other}) == 1
    assert one != FrozenMap({"a": 1})
    assert one != 1


def test_it_cannot_be_changed_or_hold_mutable_values() -> None:
    source = {"a": 1}
    frozen = FrozenMap(source)
    source["a"] = 2
    assert frozen["a"] == 1
    with pytest.raises(TypeError):
        frozen["a"] = 2  # type: ignore[index]
    with pytest.raises(TypeError, match="unhashable"):
        FrozenMap({"a": [1]})


def test_it_is_picklable() -> None:
    frozen = FrozenMap({"a": (1, 2)})
    assert pickle.loads(pickle.dumps(frozen)) == frozen
