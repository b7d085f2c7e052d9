"""Elastic pools with a head: nodes come and go beside its death, and the node beside it stays."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import NodeLost, PoolClosed, RefLost
from skyward.events import Emit, Event, NodeReplaced, PoolScaled
from skyward.events import NodeLost as NodeLostEvent
from skyward.testing.engine_suite import appear, wait_for
from skyward.values.machine import Machine, Offer, PoolSpec
from tests.engine.test_hosted_faults import heads_of
from tests.engines import hosted_pool, members_of, open_calls
from tests.waiting import until

_LIMIT_S = 60.0
_LARGE = 30_000_000
"""Bytes of a value that is still on its way when its node has nothing to do."""


@dataclass(frozen=True, kw_only=True)
class Gated(sky.Local):
    """Provider whose further machines come when a gate is open. The first launch is that of the pool's start."""

    gate: threading.Event = field(default_factory=threading.Event)
    waits: threading.Event = field(default_factory=threading.Event)
    has_begun: threading.Event = field(default_factory=threading.Event)

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        machines = super().launch(spec, offers, pool, nodes, emit)
        if self.has_begun.is_set():
            self.waits.set()
            assert self.gate.wait(_LIMIT_S)
        self.has_begun.set()
        return machines


@dataclass
class Elastic:
    """A pool of one to three nodes with a head, and what it told."""

    pool: sky.ComputePool
    provider: Gated
    events: list[Event] = field(default_factory=list)

    def shrink(self) -> None:
        self.pool.scale(1)
        until(lambda: len(self.pool.agent_pids()) == self.pool.nodes == 1)
        self.pool.scale(None)
        self.events.clear()
        self.provider.gate.clear()
        self.provider.waits.clear()


@pytest.fixture(scope="module")
def made() -> Iterator[Elastic]:
    events: list[Event] = []
    provider = Gated(lease_s=60.0)
    pool = hosted_pool(provider, nodes=(1, 3), idle_timeout_s=60.0, logs=False, console=False, on_event=events.append)
    with pool:
        yield Elastic(pool, provider, events)
        provider.gate.set()


@pytest.fixture
def elastic(made: Elastic) -> Elastic:
    made.shrink()
    return made


def kill_head() -> None:
    heads: list[int] = []

    def is_alone() -> bool:
        heads[:] = heads_of(os.getpid())
        return len(heads) == 1

    until(is_alone)
    os.kill(heads[0], signal.SIGKILL)


@sky.compute
def node() -> int:
    info = sky.instance_info()
    assert info is not None
    return info.node


@sky.compute
def hold(folder: Path, name: str, gate: str = "go") -> int:
    with open(folder / f"began-{name}", "a", encoding="ascii") as file:
        file.write("x")
    wait_for(folder / gate)
    return node.local()


@sky.compute
def fill(folder: Path, name: str) -> bytes:
    hold.local(folder, name)
    return bytes(_LARGE)


def test_many_waiting_calls_get_further_nodes(elastic: Elastic, tmp_path: Path) -> None:
    """How soon is tested on hosts, where nothing else runs in the program."""
    elastic.provider.gate.set()
    futures = [hold(tmp_path, str(number)) > elastic.pool for number in range(100)]
    until(lambda: elastic.pool.nodes == 3)
    appear(tmp_path / "go")
    assert {future.result(_LIMIT_S) for future in futures} == {0, 1, 2}
    grown = [event for event in elastic.events if isinstance(event, PoolScaled) and event.before < event.nodes]
    assert elastic.pool.nodes == grown[-1].nodes


def test_a_head_that_dies_during_a_launch_costs_no_call_and_no_node(elastic: Elastic, tmp_path: Path) -> None:
    pool = elastic.pool
    waiting = [hold(tmp_path, str(number)) > pool for number in range(3)]
    named = node() > pool.node(2)
    assert elastic.provider.waits.wait(_LIMIT_S)
    kill_head()
    elastic.provider.gate.set()
    until(lambda: pool.nodes > 1)
    kill_head()
    appear(tmp_path / "go")
    assert {future.result(_LIMIT_S) for future in waiting} <= {0, 1, 2}
    assert named.result(_LIMIT_S) == 2
    assert [(tmp_path / f"began-{number}").read_text() for number in range(3)] == ["x"] * 3
    assert sky.compute(abs)(-1) >> pool == 1  # by the last head


@pytest.mark.parametrize("number", range(3))
def test_a_head_that_dies_while_nodes_join_leaves_them_to_the_next(elastic: Elastic, number: int) -> None:
    pool = elastic.pool
    elastic.provider.gate.set()
    scaling = threading.Thread(target=pool.scale, args=(3,))
    scaling.start()
    assert elastic.provider.waits.wait(_LIMIT_S)
    time.sleep(number * 0.01)  # before, while or after they join: each is right
    kill_head()
    scaling.join(_LIMIT_S)
    assert node() @ pool == [0, 1, 2]
    assert len(pool.agent_pids()) == 3


def test_a_node_is_there_once_a_call_has_run_on_it(elastic: Elastic, monkeypatch: pytest.MonkeyPatch) -> None:
    members, may_know = members_of(elastic.pool), threading.Event()
    ask = members._ask_to_join  # private: the head's reply to it comes late

    @dataclass
    class Late:
        asked: Any

        def result(self) -> Any:
            reply = self.asked.result()
            assert may_know.wait(_LIMIT_S)
            return reply

    monkeypatch.setattr(members, "_ask_to_join", lambda machines: Late(ask(machines)))  # private: as above
    elastic.provider.gate.set()
    pid = sky.compute(os.getpid)
    own = pid() >> elastic.pool.node(1)
    pids = pid() @ elastic.pool
    may_know.set()
    assert len(pids) == 2
    assert own in pids


def test_nodes_that_were_leaving_go_after_the_death_of_the_head(elastic: Elastic, tmp_path: Path) -> None:
    pool = elastic.pool
    elastic.provider.gate.set()
    pool.scale(3)
    running = [hold(tmp_path, str(number)) > pool for number in range(3)]
    for number in range(3):
        wait_for(tmp_path / f"began-{number}")
    pool.scale(1)
    until(lambda: pool.nodes == 1)
    kill_head()
    appear(tmp_path / "go")
    assert sorted(future.result(_LIMIT_S) for future in running) == [0, 1, 2]
    until(lambda: len(pool.agent_pids()) == pool.nodes == 1)
    assert node() @ pool == list(pool.agent_pids())


@pytest.mark.parametrize("is_noted", [False, True])
def test_a_head_that_dies_while_it_gives_a_node_back_costs_no_value_and_no_machine(
    elastic: Elastic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_noted: bool
) -> None:
    """`is_noted`: whether the program has the end of the node in its books when the head dies."""
    pool, provider = elastic.pool, elastic.provider
    provider.gate.set()
    pool.scale(3)
    provider.waits.clear()
    elastic.events.clear()
    members, told = members_of(pool), list[tuple[int, frozenset[int]]]()
    given_back = members.given_back

    def die(node: int) -> None:
        told.append((node, open_calls(pool)))
        if len(told) > 1 or is_noted:
            given_back(node)
        if len(told) == 1:
            kill_head()

    monkeypatch.setattr(members, "given_back", die)
    running = hold(tmp_path, "running", "go on") > pool.node(0)
    values = {number: fill(tmp_path, str(number)) > pool.node(number) for number in (1, 2)}
    for name in ("running", "1", "2"):
        wait_for(tmp_path / f"began-{name}")
    pool.scale(1)
    until(lambda: pool.nodes == 1)
    waiting = hold(tmp_path, "waiting", "go on") > pool
    appear(tmp_path / "go")
    until(lambda: told)
    appear(tmp_path / "go on")
    assert [len(value.result(_LIMIT_S)) for value in values.values()] == [_LARGE] * 2
    assert running.result(_LIMIT_S) == 0
    waiting.result(_LIMIT_S)
    until(lambda: len(pool.agent_pids()) == pool.nodes == 1)
    assert {(tmp_path / f"began-{name}").read_text() for name in ("running", "waiting", "1", "2")} == {"x"}
    assert len(told) == (2 if is_noted else 3)
    assert not [node for node, still_open in told if node in values and values[node].call_id in still_open]
    assert not provider.waits.is_set()
    assert not [event for event in elastic.events if isinstance(event, NodeLostEvent | NodeReplaced)]


@pytest.mark.parametrize("killed", ["head", "target", "source"])
def test_a_value_that_moves_off_a_node_is_whole_or_lost_with_its_node(elastic: Elastic, killed: str) -> None:
    pool = elastic.pool
    elastic.provider.gate.set()
    pool.scale(2)
    # With a value of its own, the first node is not given back in place of the other.
    own, kept = [sky.compute(bytes)(3_000_000 + number).keep() >> pool.node(number) for number in (0, 1)]
    agents = pool.agent_pids()
    os.kill(agents[0], signal.SIGSTOP)  # a move cannot end now
    pool.scale(1)
    time.sleep(0.2)  # several looks at the pool
    assert len(pool.agent_pids()) == 2
    if killed == "head":
        kill_head()
        os.kill(agents[0], signal.SIGCONT)
    else:
        os.kill(agents[0 if killed == "target" else 1], signal.SIGKILL)
        if killed == "source":
            os.kill(agents[0], signal.SIGCONT)
    if killed == "source":
        with pytest.raises(RefLost):
            kept.get()
    else:
        until(lambda: len(pool.agent_pids()) == 1)
        assert len(kept.get()) == 3_000_001
        assert sky.compute(len)(kept) >> pool == 3_000_001
    if killed != "target":
        assert len(own.get()) == 3_000_000


def test_the_only_node_is_replaced_when_it_is_lost_with_the_head(elastic: Elastic, tmp_path: Path) -> None:
    pool = elastic.pool
    elastic.provider.gate.set()
    (agent,) = pool.agent_pids().values()
    running, again = hold(tmp_path, "lost") > pool, hold.with_options(retries=1)(tmp_path, "again") > pool
    wait_for(tmp_path / "began-lost")
    (head,) = heads_of(os.getpid())
    os.kill(head, signal.SIGSTOP)  # it does not learn of the other
    os.kill(agent, signal.SIGKILL)
    os.kill(head, signal.SIGKILL)
    with pytest.raises(NodeLost):
        running.result(_LIMIT_S)
    appear(tmp_path / "go")
    again.result(_LIMIT_S)
    assert agent not in pool.agent_pids().values()
    assert sky.compute(abs)(-1) >> pool == 1


def test_a_pool_that_is_closed_while_nodes_come_ends_their_launch() -> None:
    provider, errors = Gated(), list[BaseException]()

    def scale(pool: sky.ComputePool) -> None:
        try:
            pool.scale(2)
        except PoolClosed as error:
            errors.append(error)

    with hosted_pool(provider, nodes=(1, 2), logs=False, console=False) as pool:
        scaling = threading.Thread(target=scale, args=(pool,))
        scaling.start()
        assert provider.waits.wait(_LIMIT_S)
        threading.Timer(0.3, provider.gate.set).start()
    scaling.join(_LIMIT_S)
    assert [type(error) for error in errors] == [PoolClosed]
