"""The examples in the error classes' docstrings run."""

from __future__ import annotations

from skyward import errors
from tests.doctests import run_examples


def test_the_examples_run() -> None:
    run_examples(errors)
