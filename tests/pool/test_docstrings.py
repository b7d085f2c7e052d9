"""Examples in the docstrings of pools, targets and futures."""

from __future__ import annotations

from types import ModuleType

import pytest

from skyward.calls import futures
from skyward.pool import pool, targets
from tests.doctests import run_examples


@pytest.mark.parametrize("module", [pool, targets, futures], ids=lambda module: module.__name__)
def test_the_examples_run(module: ModuleType) -> None:
    run_examples(module)
