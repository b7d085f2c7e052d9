"""Fixtures with the parts of an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.parts import Parts


@pytest.fixture
def parts() -> Iterator[Parts]:
    parts = Parts()
    yield parts
    parts.close()
