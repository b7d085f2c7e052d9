"""Examples in the docstrings of the values."""

from __future__ import annotations

from types import ModuleType

import pytest

from skyward.values import machine, topology
from tests.doctests import run_examples


@pytest.mark.parametrize("module", [machine, topology], ids=lambda module: module.__name__)
def test_the_examples_run(module: ModuleType) -> None:
    run_examples(module)
