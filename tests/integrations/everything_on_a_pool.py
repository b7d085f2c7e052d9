"""A pytest plugin: joblib calls without a chosen backend run on a pool. It serves scikit-learn's own tests."""

from __future__ import annotations

import contextlib

import pytest

import skyward as sky

_open = contextlib.ExitStack()


def pytest_sessionstart(session: pytest.Session) -> None:
    _open.enter_context(sky.integrations.ScikitLearnPool(sky.Local(), nodes=2, cancel_grace_s=0.5))


def pytest_sessionfinish(session: pytest.Session) -> None:
    _open.close()
