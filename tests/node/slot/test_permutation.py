"""The shuffled order, which is computed and not stored."""

from __future__ import annotations

import itertools
from collections import Counter
from math import factorial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.node.slot import permutation
from skyward.node.slot.permutation import Permutation
from tests.doctests import run_examples

PINNED = [7, 8, 1, 5, 4, 0, 6, 3, 9, 2]  # n=10, seed=0


def test_examples_in_docstrings_run() -> None:
    run_examples(permutation)


@given(n=st.integers(0, 3000), seed=st.integers())
def test_every_number_comes_exactly_once(n: int, seed: int) -> None:
    assert sorted(Permutation(n, seed=seed).take(range(n))) == list(range(n))


@given(n=st.integers(1, 5000), seed=st.integers(), data=st.data())
def test_python_and_numpy_give_the_same_numbers(n: int, seed: int, data: st.DataObject) -> None:
    start, step = data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, n))
    order, places = Permutation(n, seed=seed), range(start, n, step)
    assert order.take_array(places).tolist() == list(order.take(places))


@pytest.mark.parametrize("n", [2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40, 2**62])
def test_python_and_numpy_agree_beyond_one_machine_word(n: int) -> None:
    places = range(n - 1000, n)
    order = Permutation(n, seed=7)
    taken = list(order.take(places))
    assert order.take_array(places).tolist() == taken
    assert len(set(taken)) == 1000
    assert all(0 <= number < n for number in taken)


def test_more_numbers_than_one_block_are_taken() -> None:
    order = Permutation(100_000, seed=1)
    assert order.take_array(range(100_000)).tolist() == list(order.take(range(100_000)))


def test_the_order_is_the_same_in_every_release() -> None:
    # The order is pinned: a data loader that resumes at position k must meet the order that it left.
    assert list(Permutation(10, seed=0).take(range(10))) == PINNED
    assert list(Permutation(10, seed=1).take(range(10))) != PINNED


def test_every_order_of_few_elements_is_equally_likely() -> None:
    for n in (2, 3, 4, 5):
        orders = factorial(n)
        seeds = 100 * orders
        seen = Counter(tuple(Permutation(n, seed=seed).take(range(n))) for seed in range(seeds))
        chi_square = sum((seen[order] - 100) ** 2 / 100 for order in itertools.permutations(range(n)))
        # The mean is orders - 1 and the deviation sqrt(2 * mean). The seeds are fixed, so this does not flicker.
        assert chi_square < orders - 1 + 4 * (2 * (orders - 1)) ** 0.5, n


def test_neighbours_are_unrelated() -> None:
    np = pytest.importorskip("numpy")
    order = Permutation(100_003, seed=3).take_array(range(100_003)).astype(float)
    for lag in (1, 2, 4, 256):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_003))[0, 1]) < 0.02
