"""Fixture of all tests of integrations."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _by_value(by_value: None) -> None: ...
