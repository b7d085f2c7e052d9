"""Nodes live as long as their client, however busy or stopped it is."""

from __future__ import annotations

import ctypes
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import skyward as sky

if TYPE_CHECKING:
    from skyward.values.machine import Machine, PoolSpec
    from tests.lifecycle.conftest import Sandbox


@sky.compute
def call_count() -> int:
    counts = sky.once("counts", lambda: [0])
    counts[0] += 1
    return counts[0]


def test_a_client_that_holds_its_gil_longer_than_the_lease_keeps_its_nodes(inside: Sandbox) -> None:
    with sky.ComputePool(sky.Local(lease_s=1.0), nodes=1, logs=False) as pool:
        assert (call_count() >> pool) == 1
        ctypes.PyDLL(None).sleep(3)  # a PyDLL call keeps the GIL
        assert (call_count() >> pool) == 2, "the same process answers"
    inside.proves_nothing_is_left()


class SlowLocal(sky.Local):
    """Local provider whose last node starts longer after the first than a lease takes."""

    def launch(self, spec: PoolSpec, *args: Any) -> list[Machine]:
        return super().launch(replace(spec, meanwhile=lambda: time.sleep(2 * self.lease_s)), *args)


def test_the_first_node_waits_for_the_last_longer_than_the_lease(inside: Sandbox) -> None:
    with sky.ComputePool(SlowLocal(lease_s=3.0), nodes=2, logs=False) as pool:
        assert (call_count() @ pool) == [1, 1]
    inside.proves_nothing_is_left()


class DistractedLocal(sky.Local):
    """Local provider whose client does something else for longer than a lease before it connects to its nodes."""

    def launch(self, *args: Any) -> list[Machine]:
        machines = super().launch(*args)
        time.sleep(2 * self.lease_s)
        return machines


def test_a_node_waits_for_its_first_contact_longer_than_the_lease(inside: Sandbox) -> None:
    with sky.ComputePool(DistractedLocal(lease_s=2.0), nodes=1, logs=False) as pool:
        assert call_count() >> pool == 1
    inside.proves_nothing_is_left()


def test_a_client_that_was_stopped_longer_than_the_lease_keeps_its_nodes(sandbox: Sandbox) -> None:
    client = sandbox.client(
        """
with sky.ComputePool(sky.Local(lease_s=1.0), nodes=2) as pool:
    before = pid() @ pool
    future = hang() > pool
    while not (here / "begun").exists():
        time.sleep(0.01)
    say("stop me")
    time.sleep(0.5)
    assert pid() >> pool in before
    future.cancel()
    assert pid() @ pool == before
    say("went on")
"""
    )
    client.says("stop me")
    client.send(signal.SIGSTOP)
    time.sleep(2.5)
    client.send(signal.SIGCONT)
    client.says("went on")
    assert client.ends() == (0, []), client.errors
    sandbox.proves_nothing_is_left()
