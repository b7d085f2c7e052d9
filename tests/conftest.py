"""What holds for every test."""

from __future__ import annotations

import os
import sys

import pytest

from tests.hosts.fixtures import (
    addresses,
    bed,
    ec2,
    ec2_server,
    hosts,
    new_host,
    package_index,
    pytest_collection_finish,
    relay,
    require_hosts,
    torch_index,
)

__all__ = [
    "addresses",
    "bed",
    "ec2",
    "ec2_server",
    "hosts",
    "new_host",
    "package_index",
    "pytest_collection_finish",
    "relay",
    "torch_index",
]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and not (sys.platform == "linux" and os.geteuid() == 0):
        pytest.skip("needs root on Linux")
    if item.get_closest_marker("hosts"):
        require_hosts()
