"""A lost node whose replacement fails at first gets another; one that is given up leaves nothing."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field

import pytest

import skyward as sky
from skyward.errors import NodeLost, Unreachable
from skyward.events import Emit, Event, NodeReplaced
from skyward.events import NodeLost as NodeLostEvent
from skyward.machine import Machine, Offer, PoolSpec
from tests.waiting import until


@dataclass(frozen=True, kw_only=True)
class Failing(sky.Local):
    """Its launches after the first do what `fates` say: "unreachable", "final", "dead" (it dies at once) or "well"."""

    fates: tuple[str, ...]
    made: list[Machine] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    is_waiting: threading.Event = field(default_factory=threading.Event)

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        fate = ("well", *self.fates)[len(self.launches)]
        self.launches.append(fate)
        if fate == "hangs":
            self.is_waiting.set()
            assert spec.stop.wait(30)
            raise Unreachable("told to stop", was_stopped=True)
        if fate in ("unreachable", "final"):
            raise Unreachable("the connection was lost", is_final=fate == "final")
        machines = super().launch(spec, offers, pool, nodes, emit)
        self.made.extend(machines)
        if fate == "dead":
            os.kill(machines[0].pid, signal.SIGKILL)
            machines[0].handle.wait()
        return machines

    def is_empty(self) -> bool:
        return not any(os.path.exists(machine.folder) for machine in self.made)


def lose(pool: sky.ComputePool) -> None:
    (agent,) = pool.agent_pids().values()
    os.kill(agent, signal.SIGKILL)
    until(lambda: not pool.agent_pids() or list(pool.agent_pids().values()) != [agent])


@pytest.mark.parametrize("fates", [("unreachable", "well"), ("dead", "dead", "well")])
def test_what_may_pass_is_tried_again(fates: tuple[str, ...]) -> None:
    seen: list[Event] = []
    provider = Failing(fates=fates)
    with sky.ComputePool(provider, logs=False, on_event=seen.append) as pool:
        lose(pool)
        assert sky.compute(abs)(-3) >> pool == 3
        until(lambda: any(isinstance(event, NodeReplaced) for event in seen))
    assert provider.launches == ["well", *fates]
    assert provider.is_empty()


@pytest.mark.parametrize("fates", [("final",), ("dead", "dead", "dead")])
def test_a_node_that_is_given_up_leaves_nothing_while_its_pool_is_open(
    fates: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[Event] = []
    provider = Failing(fates=fates)
    with sky.ComputePool(provider, logs=False, on_event=seen.append) as pool:
        lose(pool)
        until(lambda: any(isinstance(event, NodeLostEvent) and not event.will_be_replaced for event in seen))
        with pytest.raises(NodeLost):
            sky.compute(abs)(-3) >> pool
        until(provider.is_empty)
    assert provider.launches == ["well", *fates]
    assert "could not be replaced: Unreachable" in capfd.readouterr().err


def test_closing_a_pool_ends_the_launch_that_is_under_way() -> None:
    provider = Failing(fates=("hangs",))
    with sky.ComputePool(provider, logs=False) as pool:
        lose(pool)
        assert provider.is_waiting.wait(20)
    assert provider.is_empty()
