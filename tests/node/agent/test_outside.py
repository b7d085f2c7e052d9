"""Facts that an agent started by a log-in finds out about its surroundings."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os
from skyward.node.agent.outside import _with_address
from skyward.wire.tasks import NodeConfig
config = NodeConfig(pool="p", node=0, folder="/tmp", slots=1, python="", path=(), cwd="/", env=(), address="")
for connection in ("10.9.9.1 5 10.9.9.9 22", "::ffff:10.9.9.1 5 ::ffff:10.9.9.9 22", "fd00:9::1 5 fd00:9::9 22",
                   "UNKNOWN 65535 UNKNOWN 65535", "fd00:9::1 5 fd00:9::7 22"):
    os.environ["SSH_CONNECTION"] = connection
    found = _with_address(config)
    print(found.address, found.interface)
"""
NETWORK = (
    "ip link set lo up; ip link add v0 type veth peer name v1; ip addr add 10.9.9.9/24 dev v0; "
    'ip addr add fd00:9::9/64 dev v0 nodad; ip link set v0 up; exec "$@"'
)


@pytest.mark.root
def test_other_nodes_learn_an_ipv4_address_however_the_log_in_came() -> None:
    """The agent runs in its own network namespace without a default route."""
    argv = ["unshare", "-n", "sh", "-c", NETWORK, "sh", sys.executable, "-c", CODE]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["10.9.9.9 v0", "10.9.9.9 v0", "10.9.9.9 v0", "127.0.0.1 lo", "127.0.0.1 lo"]
