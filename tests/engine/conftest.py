"""Fixtures with the parts of an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.parts import Parts


@pytest.fixture(scope="module", autouse=True)
def _by_value(by_value: None) -> None: ...


@pytest.fixture
def parts() -> Iterator[Parts]:
    parts = Parts()
    yield parts
    parts.close()
