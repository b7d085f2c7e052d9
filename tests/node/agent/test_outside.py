"""Facts that an agent started by a log-in finds out about its surroundings; and the end of processes by a log-in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_the_end_of_what_never_ran_removes_its_folder_and_kills_nothing(tmp_path: Path) -> None:
    """Without a start, the number 0 would mean the process group of the log-in. A start of Ray that fails has none."""
    folder = tmp_path / "ray-1f2e3d-0a"
    folder.mkdir()
    (folder / "token").write_text("secret")
    code = "from skyward.node.agent.outside import end; end()"
    argv = [sys.executable, "-c", code, "0", "", str(folder), "0"]
    done = subprocess.run(argv, check=False, timeout=60, start_new_session=True)
    assert (done.returncode, folder.exists()) == (0, False)
