"""Nodes that are reached only by a command live and end with their client, and rented machines are given back."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import skyward as sky
from tests.channels import Relayed
from tests.waiting import until

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Sandbox


RELAYED = "from tests.channels import Relayed\n"


@sky.compute
def pid() -> int:
    return os.getpid()


def test_a_killed_client_leaves_no_node_behind_a_command(sandbox: Sandbox) -> None:
    client = sandbox.client(
        RELAYED
        + """
with sky.ComputePool(Relayed(lease_s=600), nodes=2) as pool:
    hang_with_detached_children() @ pool
"""
    )
    sandbox.waits_for("begun")
    client.kill()
    sandbox.proves_nothing_is_left()


def test_a_client_that_is_killed_while_it_starts_leaves_no_node_behind_a_command(sandbox: Sandbox) -> None:
    client = sandbox.client(RELAYED + "sky.ComputePool(Relayed(lease_s=2.0), nodes=2).start()\ntime.sleep(600)")
    until(lambda: sandbox.pids("slot"))
    client.kill()
    sandbox.proves_nothing_is_left()


def test_nodes_behind_a_command_end_by_their_lease_when_client_and_keeper_are_killed(sandbox: Sandbox) -> None:
    client = sandbox.client(
        RELAYED
        + """
with sky.ComputePool(Relayed(lease_s=2.0), nodes=2) as pool:
    hang_with_detached_children() @ pool
"""
    )
    sandbox.waits_for("begun")
    (keeper,) = sandbox.pids("keeper")
    os.kill(keeper, signal.SIGSTOP)
    client.kill()
    os.kill(keeper, signal.SIGKILL)
    sandbox.proves_nothing_is_left()


def test_a_keeper_that_is_killed_is_replaced_before_the_leases_end(sandbox: Sandbox) -> None:
    client = sandbox.client(  # a process of its own: this process's keeper may serve pools of other tests too
        RELAYED
        + """
with sky.ComputePool(Relayed(lease_s=8.0), nodes=2, logs=False) as pool:
    before = pid() @ pool
    say("ready")
    time.sleep(10)  # the keeper is killed meanwhile, and this is longer than the lease
    assert pid() @ pool == before
"""
    )
    client.says("ready")
    sandbox.kills("keeper")
    assert client.ends() == (0, [])
    sandbox.proves_nothing_is_left()


GUARD = """
from skyward.engine.keeper import Keeper
keeper = Keeper.of_this_process()
command = [sys.executable, "-c", "import sys; print('reaped', sys.argv[1]); open(sys.argv[2], 'w')"]
keeper.guard("mine", [*command, "mine", str(here / "reaped-mine")], log_path=str(here / "reap.log"))
keeper.guard("given-back", [*command, "given-back", str(here / "reaped-given-back")])
keeper.release("given-back")
"""


def test_only_the_pools_of_a_killed_client_are_reaped(sandbox: Sandbox) -> None:
    client = sandbox.client(GUARD + "say('ready')\ntime.sleep(600)")
    client.says("ready")
    client.kill()
    sandbox.waits_for_file("reaped-mine")
    sandbox.proves_nothing_is_left()
    assert (sandbox.folder / "reap.log").read_text() == "reaped mine\n"
    assert not sandbox.exists("reaped-given-back")


def test_nothing_is_reaped_after_a_client_gave_everything_back(sandbox: Sandbox) -> None:
    client = sandbox.client(GUARD + "keeper.release('mine')\nsay('done')")
    client.says("done")
    assert client.ends()[0] == 0
    sandbox.proves_nothing_is_left()
    assert not sandbox.exists("reaped-mine")


def test_machines_are_reaped_after_their_nodes_have_ended(sandbox: Sandbox) -> None:
    # A process that has ended has no command, also as long as nobody has waited for it.
    look = "from pathlib import Path; import sys; file = Path('/proc', Path(sys.argv[3]).read_text(), 'cmdline'); "
    look += "print('ended' if not file.exists() or not file.read_text() else 'running');"
    guard = GUARD.replace('"import sys;', f'"{look}')
    guard = guard.replace('str(here / "reaped-mine")', 'str(here / "reaped-mine"), str(here / "agent")')
    client = sandbox.client(
        guard + RELAYED + "with sky.ComputePool(Relayed(lease_s=600)) as pool:\n    hang() >> pool\n"
    )
    sandbox.waits_for("begun")
    (agent,) = sandbox.pids("agent")
    (sandbox.folder / "agent").write_text(str(agent))
    client.kill()
    sandbox.waits_for_file("reaped-mine")
    until(lambda: (sandbox.folder / "reap.log").read_text().endswith("reaped mine\n"))  # it is written at the end
    assert (sandbox.folder / "reap.log").read_text() == "ended\nreaped mine\n"
    sandbox.proves_nothing_is_left()


def test_a_killed_keeper_still_guards(sandbox: Sandbox) -> None:
    client = sandbox.client(GUARD + "say('ready')\ntime.sleep(600)")
    client.says("ready")
    (first,) = sandbox.kills("keeper")
    until(lambda: sandbox.pids("keeper") not in ([], [first]))
    client.kill()
    sandbox.waits_for_file("reaped-mine")
    sandbox.proves_nothing_is_left()


def test_a_command_that_fails_is_run_again(sandbox: Sandbox) -> None:
    client = sandbox.client(
        """
from skyward.engine.keeper import Keeper
code = "import os, sys; sys.exit(0 if os.path.exists(sys.argv[1]) else open(sys.argv[1], 'w').close() or 1)"
Keeper.of_this_process().guard("mine", [sys.executable, "-c", code + "", str(here / "failed-once")])
say("ready")
time.sleep(600)
"""
    )
    client.says("ready")
    client.kill()
    sandbox.waits_for_file("failed-once")
    sandbox.proves_nothing_is_left()


def test_a_hanging_host_delays_the_lease_of_no_other(inside: Sandbox) -> None:
    provider = Relayed(lease_s=5.0)
    with sky.ComputePool(provider, nodes=2, logs=False) as pool:
        before = pid() @ pool
        until(lambda: len(provider.relays(0)) == 2)
        provider.hang(0)
        until(lambda: not os.path.exists(f"/proc/{before[0]}"))  # its lease is over
        time.sleep(5)
        assert os.path.exists(f"/proc/{before[1]}")
    inside.proves_nothing_is_left()


def test_a_script_that_never_closes_its_pool_exits_promptly_and_leaves_nothing(sandbox: Sandbox) -> None:
    client = sandbox.client(
        RELAYED
        + """
pool = sky.ComputePool(Relayed(lease_s=600), nodes=2).start()
print((pid() >> pool) > 0)
future = hang() > pool
say("end")
"""
    )
    client.says("end")
    code, _ = client.ends()
    assert code == 0, client.errors
    sandbox.proves_nothing_is_left()


def test_an_interrupted_client_leaves_nothing(sandbox: Sandbox) -> None:
    client = sandbox.client(
        RELAYED + "with sky.ComputePool(Relayed(lease_s=600), nodes=2) as pool:\n    hang() >> pool\n"
    )
    sandbox.waits_for("begun")
    client.send(signal.SIGINT, to_group=True)  # as a terminal does: the commands of the links must not get it
    code, _ = client.ends()
    assert code != 0
    assert "KeyboardInterrupt" in client.errors
    sandbox.proves_nothing_is_left()
    assert not sandbox.exists("finished")


def test_a_working_client_keeps_its_nodes_while_its_keeper_is_stopped(sandbox: Sandbox) -> None:
    client = sandbox.client(
        RELAYED
        + """
with sky.ComputePool(Relayed(lease_s=5.0), nodes=1) as pool:
    before = pid() >> pool
    say("stop the keeper")
    time.sleep(7)
    assert (pid() >> pool) == before
    say("the same")
"""
    )
    client.says("stop the keeper")
    (keeper,) = sandbox.pids("keeper")
    os.kill(keeper, signal.SIGSTOP)
    client.says("the same")
    os.kill(keeper, signal.SIGCONT)
    assert client.ends()[0] == 0, client.errors
    sandbox.proves_nothing_is_left()
