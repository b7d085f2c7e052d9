"""What holds for every test."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

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


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a script: tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # started by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What pools write down is not the user's: the output of only so many of his pools is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and not (sys.platform == "linux" and os.geteuid() == 0):
        pytest.skip("needs root on Linux")
    if item.get_closest_marker("hosts"):
        require_hosts()
