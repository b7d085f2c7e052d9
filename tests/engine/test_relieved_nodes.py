"""Nodes whose machines their provider takes back, in pools with a head: finished calls keep their values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.engine.head_machines import HeadMachines
from skyward.node.agent.apart import kill_all
from skyward.providers import local
from skyward.testing.engine_suite import appear, wait_for
from skyward.values.machine import Machine
from skyward.wire.tasks import NodeConfig
from tests.engines import head_place, hosted_pool, machine_of, open_calls
from tests.own_hosts import OwnHosts
from tests.waiting import until

_LIMIT_S = 60.0
_LARGE = 30_000_000
"""Bytes of a value that is still on its way when its node has nothing to do."""


@dataclass(frozen=True, kw_only=True)
class TakenBack(OwnHosts):
    """Provider that can take machines back. `ending` has a function that is called when machines are ended."""

    ending: list[Callable[[], object]] = field(default_factory=list)

    def terminate(self, machines: list[Machine]) -> None:
        for act in self.ending:
            act()
        super().terminate(machines)


@dataclass
class Taken:
    """A pool of two nodes with a head beside one of them."""

    pool: sky.ComputePool
    provider: TakenBack
    notices: Path
    on_relieved: Callable[[Callable[[], object]], object] | None = None
    """Function that is called when the program is told of a relieved node, with one that notes it."""

    def notify(self, node: int) -> None:
        """Let the provider announce that it takes the machine of a node back. Return once it gets no calls."""
        self.provider.begins.clear()
        (self.notices / os.path.basename(machine_of(self.pool, node).folder)).write_text("terminate")
        assert self.provider.begins.wait(_LIMIT_S), "another machine is launched"

    @property
    def place(self) -> int:
        """Node beside the head."""
        place = head_place(self.pool)
        assert place is not None
        return place

    def kill_head(self) -> None:
        kill_all(self.provider.login.heads[-1])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Taken]:
    notices, note_relieved = tmp_path_factory.mktemp("notices"), HeadMachines.note_relieved

    def with_notice(**fields: Any) -> NodeConfig:
        return NodeConfig(**fields, notice_file=str(notices / os.path.basename(fields["folder"])))

    def note(machines: HeadMachines, node: int) -> None:
        if pool_of_tests.on_relieved is None:
            note_relieved(machines, node)
        else:
            pool_of_tests.on_relieved(partial(note_relieved, machines, node))

    provider = TakenBack(lease_s=60.0)
    provider.gate.set()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(local, "NodeConfig", with_notice)
        monkeypatch.setattr(HeadMachines, "note_relieved", note)
        pool_of_tests = Taken(hosted_pool(provider, nodes=2, logs=False, console=False), provider, notices)
        with pool_of_tests.pool:
            yield pool_of_tests


@pytest.fixture
def taken(made: Taken) -> Iterator[Taken]:
    yield made
    made.on_relieved = None
    made.provider.ending.clear()


@sky.compute
def hold(folder: Path, name: str, gate: str = "go") -> int:
    with open(folder / f"began-{name}", "a", encoding="ascii") as file:
        file.write("x")
    wait_for(folder / gate)
    info = sky.instance_info()
    assert info is not None
    return info.node


@sky.compute
def fill(folder: Path, name: str) -> bytes:
    hold.local(folder, name)
    return bytes(_LARGE)


@pytest.mark.parametrize(
    ("moment", "is_beside"),
    [("before it is noted", False), ("once it is noted", False), ("once it ends", True)],
)
def test_a_head_that_dies_while_it_relieves_a_node_costs_no_value(
    taken: Taken, tmp_path: Path, moment: str, is_beside: bool
) -> None:
    """`moment`: as the books of the program have the node. `is_beside`: whether it is that of the head."""
    pool, told = taken.pool, list[frozenset[int]]()
    node = taken.place if is_beside else 1 - taken.place
    machine = machine_of(pool, node)

    def die(note: Callable[[], object]) -> None:
        told.append(open_calls(pool))
        if len(told) > 1 or moment != "before it is noted":
            note()
        if len(told) == 1 and moment != "once it ends":
            taken.kill_head()

    taken.on_relieved = die
    if moment == "once it ends":
        taken.provider.ending.append(taken.kill_head)
    kept = sky.compute(bytes)(3_000_000).keep() >> pool.node(node)
    running = hold(tmp_path, "running", "go on") > pool.node(1 - node)
    value = fill(tmp_path, "value") > pool.node(node)
    for name in ("running", "value"):
        wait_for(tmp_path / f"began-{name}")
    taken.notify(node)
    waiting = [hold(tmp_path, "named", "go on") > pool.node(node), hold(tmp_path, "any", "go on") > pool]
    appear(tmp_path / "go")
    until(lambda: told)
    appear(tmp_path / "go on")
    assert len(value.result(_LIMIT_S)) == _LARGE
    assert running.result(_LIMIT_S) == 1 - node
    assert waiting[0].result(_LIMIT_S) == node
    waiting[1].result(_LIMIT_S)
    assert len(kept.get()) == 3_000_000
    until(lambda: machine_of(pool, node) is not machine)
    assert {(tmp_path / f"began-{name}").read_text() for name in ("running", "value", "named", "any")} == {"x"}
    assert not [calls for calls in told if value.call_id in calls]
    assert len(told) == (2 if moment == "before it is noted" else 1)
