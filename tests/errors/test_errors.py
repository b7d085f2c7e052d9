"""The catalogue of errors: its examples run."""

from __future__ import annotations

from skyward import errors
from tests.doctests import run_examples


def test_the_examples_run() -> None:
    run_examples(errors)
