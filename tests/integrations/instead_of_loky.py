"""A pytest plugin: joblib's backend named "loky" is a pool. It serves joblib's own tests."""

from __future__ import annotations

from typing import Any

import joblib.parallel
import pytest

import skyward as sky
from skyward.integrations.joblib import SkywardBackend

_pool = sky.ComputePool(sky.Local(), concurrency=4, cancel_grace_s=0.5)


class InsteadOfLoky(SkywardBackend):
    def __init__(self, nesting_level: int | None = None, **_: Any) -> None:
        super().__init__(pool=_pool, nesting_level=nesting_level)


def pytest_sessionstart(session: pytest.Session) -> None:
    _pool.start()
    joblib.parallel.BACKENDS["loky"] = InsteadOfLoky


def pytest_sessionfinish(session: pytest.Session) -> None:
    _pool.close(cancel=True)
