"""Processes that a task detached end with its node, whatever is killed, and however the client handles its children."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

import skyward as sky
from skyward.errors import NodeLost
from tests.waiting import until

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Sandbox


CHILDREN_ARE_IGNORED = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)

@sky.compute
def detach():
    subprocess.Popen(["setsid", "--fork", "sleep", "600"])

from skyward.providers import local
local._END_LIMIT_S = 300  # a client that waited for this would not end in time
with sky.ComputePool(sky.Local(lease_s=300), nodes=1) as pool:
    detach() >> pool
say("closed")
"""
REPLACED_BY_ANOTHER_PROGRAM = """
pool = sky.ComputePool(sky.Local(), nodes=2).start()
pid() @ pool
if os.fork() == 0:
    (here / "forked").touch()
    time.sleep(600)
while not (here / "forked").exists():
    time.sleep(0.01)
os.execve("/bin/sleep", ["sleep", "600"], {})
"""


@sky.compute
def detach(begun: Path) -> None:
    subprocess.Popen(["setsid", "--fork", "sleep", "600"])  # its parent is no process of this pool
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    begun.touch()
    time.sleep(600)


@pytest.mark.parametrize("role", ["watchdog", "standby", "agent"])
def test_detached_processes_end_with_their_node_whatever_was_killed(
    inside: Sandbox, role: Literal["watchdog", "standby", "agent"]
) -> None:
    with sky.ComputePool(sky.Local(), nodes=1, logs=False) as pool:
        future = detach(inside.folder / "begun") > pool
        inside.waits_for("begun")
        until(lambda: sum("sleep" in process.command for process in inside.processes()) == 2)
        inside.kills(role)
        with pytest.raises(NodeLost):
            future.result(60)
        until(lambda: not any("sleep" in process.command for process in inside.processes()))
        assert sky.compute(abs)(-3) >> pool == 3
    inside.proves_nothing_is_left()


def test_a_client_that_ignores_its_children_closes_promptly_and_leaves_nothing(sandbox: Sandbox) -> None:
    client = sandbox.client(CHILDREN_ARE_IGNORED)
    assert client.ends() == (0, ["closed"]), client.errors
    sandbox.proves_nothing_is_left()
    assert client.errors == ""


def test_nodes_end_when_the_client_becomes_another_program_although_its_fork_lives(sandbox: Sandbox) -> None:
    client = sandbox.client(REPLACED_BY_ANOTHER_PROGRAM)
    sandbox.waits_for("forked")
    until(lambda: b"client0" not in Path(f"/proc/{client.pid}/cmdline").read_bytes())
    (child,) = [process for process in sandbox.processes() if "client0.py" in process.command]
    sandbox.proves_nothing_is_left(but=child.pid)
    client.kill()
