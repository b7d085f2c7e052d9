"""What holds for every test."""

from __future__ import annotations

import os
import sys

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and not (sys.platform == "linux" and os.geteuid() == 0):
        pytest.skip("needs root on Linux")
