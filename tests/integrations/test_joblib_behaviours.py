"""Behaviours that users of joblib may rely on are the same on a pool as on joblib's own backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.integrations.joblib import joblib_backend

from .joblib_behaviours import BEHAVIOURS, OBSERVED

pytestmark = pytest.mark.joblib_behaviours

ON_LOKY = json.loads(OBSERVED.read_text())


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(sky.Local(), nodes=2, logs=False, cancel_grace_s=0.5) as opened:
        yield opened


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_a_pool_behaves_as_loky_does(pool: sky.ComputePool, tmp_path: Path, name: str) -> None:
    with joblib_backend(pool):
        observed = BEHAVIOURS[name](tmp_path)
    assert json.loads(json.dumps(observed)) == ON_LOKY[name]
