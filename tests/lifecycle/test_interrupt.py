"""Ctrl-C at any moment, to the client or its group: one KeyboardInterrupt is raised and remote work stops."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

import skyward as sky
from skyward.values.machine import Machine

if TYPE_CHECKING:
    from tests.lifecycle.conftest import Client, Sandbox


AROUND = """
interrupts = 0
try:
{body}
except KeyboardInterrupt:
    interrupts += 1
    say("interrupted")
try:
    say(f"{{interrupts}} in all")
except KeyboardInterrupt:
    say("and again")
"""
IN_A_CALL = """
with sky.ComputePool(sky.Local(), nodes=2) as pool:
    hang() >> pool
"""
IN_A_BROADCAST = """
with sky.ComputePool(sky.Local(), nodes=2) as pool:
    hang_with_detached_children() @ pool
"""
IN_A_MAP = """
def slow(x):
    (here / "begun").touch()
    time.sleep(0.02)
    return x

with sky.ComputePool(sky.Local(), nodes=2) as pool:
    pool.map(slow, range(100000))
"""
IN_AN_IMAP = """
def slow(x):
    (here / "begun").touch()
    time.sleep(0.02)
    return x

with sky.ComputePool(sky.Local(), nodes=2) as pool:
    for _ in pool.imap(slow, iter(int, 1)):
        pass
"""
IN_A_WAIT = """
with sky.ComputePool(sky.Local(), nodes=2) as pool:
    future = hang() > pool
    future.result(timeout=500)
"""
IN_A_STREAM = """
@sky.compute
def endless():
    while True:
        (here / "begun").touch()
        yield 1
        time.sleep(600)

with sky.ComputePool(sky.Local(), nodes=2) as pool:
    for _ in endless() >> pool:
        pass
"""
IN_THE_EXIT = """
with sky.ComputePool(sky.Local(), nodes=2) as pool:
    hang() > pool
"""
DEAF = """
@sky.compute
def deaf():
    (here / "begun").touch()
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            pass

with sky.ComputePool(sky.Local(), nodes=2, cancel_grace_s=0.3) as pool:
    deaf() >> pool
"""


def interrupt(client: Client, to_group: bool) -> None:
    client.send(signal.SIGINT, to_group=to_group)


def around(body: str) -> str:
    return AROUND.format(body="\n".join("    " + line for line in body.splitlines()))


def proves_one_interrupt(sandbox: Sandbox, client: Client) -> None:
    code, lines = client.ends()
    assert (code, lines) == (0, ["interrupted", "1 in all"]), client.errors
    assert client.errors == ""
    sandbox.proves_nothing_is_left()
    assert not sandbox.exists("finished")


@pytest.mark.parametrize("to_group", [False, True], ids=["client", "group"])
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(IN_A_CALL, id="call"),
        pytest.param(IN_A_BROADCAST, id="broadcast"),
        pytest.param(IN_A_MAP, id="map"),
        pytest.param(IN_AN_IMAP, id="imap"),
        pytest.param(IN_A_WAIT, id="future"),
        pytest.param(IN_A_STREAM, id="stream"),
        pytest.param(IN_THE_EXIT, id="exit"),
        pytest.param(DEAF, id="deaf-task"),
    ],
)
def test_an_interrupt_stops_the_work_and_leaves_nothing(sandbox: Sandbox, body: str, to_group: bool) -> None:
    client = sandbox.client(around(body))
    sandbox.waits_for("begun")
    interrupt(client, to_group)
    proves_one_interrupt(sandbox, client)


@pytest.mark.parametrize("event", ["folder", "watchdog", "agent", "slot"])
def test_an_interrupt_while_a_pool_starts_leaves_nothing(sandbox: Sandbox, event: str) -> None:
    body = "with sky.ComputePool(sky.Local(), nodes=2) as pool:\n    hang() >> pool"
    client = sandbox.client(around(body))
    while not (sandbox.runtime_entries() if event == "folder" else sandbox.pids(event)):
        assert client.process.poll() is None, client.errors
    interrupt(client, to_group=True)
    proves_one_interrupt(sandbox, client)


def test_a_pool_goes_on_after_an_interrupted_call(sandbox: Sandbox) -> None:
    client = sandbox.client(
        """
with sky.ComputePool(sky.Local(), nodes=1) as pool:
    before = pid() >> pool
    try:
        hang() >> pool
    except KeyboardInterrupt:
        say("interrupted")
    assert (pid() >> pool) == before, "the slot itself should have survived a SIGINT"
    say("went on")
"""
    )
    sandbox.waits_for("begun")
    interrupt(client, to_group=False)
    code, lines = client.ends()
    assert (code, lines) == (0, ["interrupted", "went on"]), client.errors
    sandbox.proves_nothing_is_left()


def test_a_second_interrupt_while_the_pool_closes_still_leaves_nothing(sandbox: Sandbox) -> None:
    client = sandbox.client(
        """
try:
    with sky.ComputePool(sky.Local(), nodes=2) as pool:
        hang() >> pool
except KeyboardInterrupt:
    say("interrupted")
"""
    )
    sandbox.waits_for("begun")
    client.send(signal.SIGINT)
    client.send(signal.SIGINT)
    for _ in range(20):
        if client.process.poll() is not None:
            break
        client.send(signal.SIGINT)
    client.ends()
    sandbox.proves_nothing_is_left()


@dataclass(frozen=True, kw_only=True)
class InterruptedWhileItEnds(sky.Local):
    """Provider that sends Ctrl-C when its nodes have been told to end and its machines still exist."""

    def terminate(self, machines: list[Machine]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        super().terminate(machines)


def test_an_interrupt_while_a_pool_ends_is_delayed_until_it_has_ended(inside: Sandbox) -> None:
    pool = sky.ComputePool(InterruptedWhileItEnds(), logs=False)
    with pytest.raises(KeyboardInterrupt), pool:
        assert sky.compute(abs)(-1) >> pool == 1
    assert not pool.is_active
    inside.proves_nothing_is_left()
