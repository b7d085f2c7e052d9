"""Parts of an engine for tests of each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.parts import Parts


@pytest.fixture
def parts() -> Iterator[Parts]:
    parts = Parts()
    yield parts
    parts.close()
