"""The examples in the events' docstrings run."""

from __future__ import annotations

from skyward import events
from tests.doctests import run_examples


def test_the_examples_run() -> None:
    run_examples(events)
