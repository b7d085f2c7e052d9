"""Pools with a head that have no nodes: the head moves to the program with the last one, and back with the first."""

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
from skyward.engine.head.messages import HeadConfig
from skyward.engine.head.place import HeadPlace
from skyward.engine.other_heads import OtherHeads
from skyward.errors import NoCapacity, PoolClosed
from skyward.events import Event, NodeLost, NodeReplaced, PoolScaled, ScalingFailed
from skyward.node.agent.apart import kill_all
from skyward.testing.engine_suite import appear, wait_for
from tests.engine.test_hosted_faults import heads_of
from tests.engines import head_place, hosted_pool, members_of, open_calls
from tests.own_hosts import OwnHosts
from tests.waiting import until

_LIMIT_S = 60.0


@dataclass
class Resting:
    """A pool of no to two nodes with a head, and what it told."""

    pool: sky.ComputePool
    provider: OwnHosts
    events: list[Event] = field(default_factory=list)

    def rest(self) -> None:
        self.provider.gate.set()
        until(lambda: self.pool.nodes == 0 and head_place(self.pool) is None)
        self.events.clear()
        self.provider.begins.clear()


@pytest.fixture(scope="module")
def made() -> Iterator[Resting]:
    events: list[Event] = []
    provider = OwnHosts(lease_s=60.0)
    provider.gate.set()
    pool = hosted_pool(provider, nodes=(0, 2), idle_timeout_s=0.5, logs=False, console=False, on_event=events.append)
    with pool:
        assert not provider.begins.is_set()
        yield Resting(pool, provider, events)


@pytest.fixture
def resting(made: Resting) -> Resting:
    made.rest()
    return made


@sky.compute
def node() -> int:
    info = sky.instance_info()
    assert info is not None
    return info.node


@sky.compute
def note(file: Path) -> int:
    with open(file, "a", encoding="ascii") as lines:
        lines.write("x")
    return node.local()


def test_the_first_call_brings_a_node_with_the_head_and_the_last_one_takes_it_along(resting: Resting) -> None:
    pool = resting.pool
    assert node() >> pool == 0
    assert head_place(pool) == 0
    pool.scale(2)
    assert node() @ pool == [0, 1]
    resting.rest()
    assert (node() > pool.node(1)).result(_LIMIT_S) == 1
    assert head_place(pool) == 1


def test_shared_state_goes_along_and_so_do_requests_that_wait(resting: Resting) -> None:
    pool = resting.pool
    counter, line, table, lock = pool.counter("count"), pool.queue("line"), pool.dict("table"), pool.lock("lock")
    fence = lock.acquire()
    counter.increment(3)
    table["key"] = [1]
    values: list[object] = []
    taking = threading.Thread(target=lambda: values.append(line.get(timeout_s=_LIMIT_S)))
    taking.start()

    @sky.compute
    def use() -> tuple[int, bool]:
        sky.queue[str]("line").put("value")
        return sky.counter("count").increment(), sky.lock("lock").is_locked()

    assert use() >> pool == (4, True)
    taking.join(_LIMIT_S)
    assert values == ["value"]
    resting.rest()
    assert (counter.value(), table["key"], lock.is_current(fence)) == (4, [1], True)
    lock.release()
    assert lock.acquire() > fence
    lock.release()
    counter.reset()
    table.clear()


@pytest.mark.parametrize("later_s", [0.5, 0.6, 0.8])
def test_calls_that_come_while_the_last_node_is_given_back_run_once(
    resting: Resting, tmp_path: Path, later_s: float
) -> None:
    pool = resting.pool
    assert node() >> pool == 0
    time.sleep(later_s)  # before, while or after the head moves: each is right
    waiting = [note(tmp_path / str(number)) > pool for number in range(8)]
    assert {future.result(_LIMIT_S) for future in waiting} <= {0, 1}
    assert [(tmp_path / str(number)).read_text() for number in range(8)] == ["x"] * 8


def test_a_call_for_which_there_is_no_machine_fails_and_the_next_one_may_have_one(resting: Resting) -> None:
    pool, provider = resting.pool, resting.provider
    provider.refusals.append(NoCapacity("own: none is left; try again later"))
    with pytest.raises(NoCapacity, match="none is left"):
        node() >> pool
    until(lambda: any(isinstance(event, ScalingFailed) for event in resting.events))
    assert node() >> pool == 0
    assert head_place(pool) == 0


def test_a_node_that_keeps_a_value_or_an_actor_stays_with_the_head(resting: Resting) -> None:
    pool = resting.pool
    kept = sky.compute(bytes)(3_000_000).keep() >> pool
    time.sleep(1.5)
    assert (pool.nodes, head_place(pool)) == (1, 0)
    assert len(kept.get()) == 3_000_000
    del kept
    resting.rest()


def test_a_head_in_the_program_that_dies_at_rest_is_followed_by_another(resting: Resting, tmp_path: Path) -> None:
    pool, provider = resting.pool, resting.provider
    provider.gate.clear()
    waiting = note(tmp_path / "waiting") > pool
    assert provider.begins.wait(_LIMIT_S)
    (head,) = heads_of(os.getpid())
    os.kill(head, signal.SIGKILL)
    provider.gate.set()
    assert waiting.result(_LIMIT_S) == 0
    assert (tmp_path / "waiting").read_text() == "x"


def test_a_head_that_begins_while_the_pool_moves_to_its_first_node_keeps_the_pool(
    resting: Resting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, members, killed = resting.pool, members_of(resting.pool), list[int]()
    until(lambda: len(heads_of(os.getpid())) == 1)  # a former one may still be ending
    reach = OtherHeads._reach  # private: it is called between the question whether the head may move, and the move

    def kill_and_reach(self: OtherHeads, config: HeadConfig, place: HeadPlace, node: int | None) -> Any:
        if not killed:
            killed.extend(heads_of(os.getpid()))
            before = members._heads  # private: it grows when the program has another head
            os.kill(killed[0], signal.SIGKILL)
            until(lambda: members._heads > before)  # private: as above
        return reach(self, config, place, node)

    monkeypatch.setattr(OtherHeads, "_reach", kill_and_reach)  # private: as above
    waiting = sky.compute(wait_for)(tmp_path / "counted") > pool
    until(waiting.running)
    assert len(killed) == 1
    counter, values = pool.counter("of the next head"), list[int]()
    counting = threading.Thread(target=lambda: values.append(counter.increment()), daemon=True)
    counting.start()
    counting.join(_LIMIT_S / 2)
    assert values == [1], "a head that was told to hand over does not answer"
    appear(tmp_path / "counted")
    waiting.result(_LIMIT_S)


def test_a_head_that_dies_while_it_hands_over_costs_no_call(resting: Resting, tmp_path: Path) -> None:
    pool, heads = resting.pool, resting.provider.login.heads
    assert node() >> pool == 0
    until(lambda: heads_of(os.getpid()))  # the next one begins
    kill_all(heads[-1])
    waiting = [note(tmp_path / str(number)) > pool for number in range(8)]
    for future in waiting:
        future.result(_LIMIT_S)
    assert [(tmp_path / str(number)).read_text() for number in range(8)] == ["x"] * 8


@pytest.mark.parametrize("is_noted", [False, True])
def test_a_head_that_dies_while_it_gives_the_last_node_back_costs_no_value_and_no_machine(
    resting: Resting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_noted: bool
) -> None:
    """`is_noted`: whether the program has the end of the node in its books when the head dies."""
    pool, heads = resting.pool, resting.provider.login.heads
    members, told = members_of(pool), list[frozenset[int]]()
    given_back = members.given_back

    def die(node: int) -> None:
        told.append(open_calls(pool))
        if len(told) > 1 or is_noted:
            given_back(node)
        if len(told) == 1:
            kill_all(heads[-1])

    monkeypatch.setattr(members, "given_back", die)
    assert note(tmp_path / "once") >> pool == 0
    resting.provider.begins.clear()
    until(lambda: told)
    until(lambda: pool.nodes == 0 and head_place(pool) is None)
    assert told == [frozenset()] * (1 if is_noted else 2)
    assert not resting.provider.begins.is_set()
    assert (tmp_path / "once").read_text() == "x"
    assert not [event for event in resting.events if isinstance(event, NodeLost | NodeReplaced)]


@pytest.mark.parametrize("fault", ["refuses", "breaks"])
def test_a_pool_goes_on_in_the_program_if_no_head_begins_beside_the_node(resting: Resting, fault: str) -> None:
    pool, login = resting.pool, resting.provider.login
    login.heads.clear()
    happens: threading.Event = getattr(login, fault)
    happens.set()
    try:
        assert node() >> pool == 0
        assert head_place(pool) is None
    finally:
        happens.clear()
    assert len(login.heads) == (fault == "breaks")  # a head was begun, although nobody heard of it, and is ended
    until(lambda: not any(Path(f"/proc/{head}").exists() for head in login.heads))
    resting.rest()
    assert node() >> pool == 0
    assert head_place(pool) == 0


def test_a_node_whose_agent_does_not_answer_when_the_head_begins_is_replaced(resting: Resting) -> None:
    pool, provider = resting.pool, resting.provider
    provider.stillborn.append(True)
    assert node() >> pool == 0
    assert not provider.stillborn


@pytest.mark.parametrize("later_s", [0.5, 0.7])
def test_a_pool_that_is_closed_while_its_head_moves_leaves_nothing(later_s: float) -> None:
    provider = OwnHosts(lease_s=60.0)
    provider.gate.set()
    with hosted_pool(provider, nodes=(0, 1), idle_timeout_s=0.5, logs=False, console=False) as pool:
        assert node() >> pool == 0
        time.sleep(later_s)
    until(lambda: not heads_of(os.getpid()))


def test_a_call_that_waits_for_its_node_fails_when_the_pool_is_closed() -> None:
    provider = OwnHosts(lease_s=60.0)
    with hosted_pool(provider, nodes=(0, 1), idle_timeout_s=0.5, logs=False, console=False) as pool:
        waiting = node() > pool
        assert provider.begins.wait(_LIMIT_S)
        threading.Timer(0.3, provider.gate.set).start()
        pool.close(cancel=True)
        with pytest.raises(PoolClosed):
            waiting.result(_LIMIT_S)


def test_a_pool_of_a_fixed_size_rests_with_its_head_and_comes_back_as_a_whole() -> None:
    provider, events = OwnHosts(lease_s=60.0), list[Event]()
    provider.gate.set()
    with hosted_pool(provider, nodes=2, idle_timeout_s=0.5, logs=False, console=False, on_event=events.append) as pool:
        assert (node() @ pool, head_place(pool)) == ([0, 1], 0)
        until(lambda: not pool.agent_pids() and head_place(pool) is None)
        assert (node() @ pool, head_place(pool)) == ([0, 1], 0)
    sizes = [(event.before, event.nodes) for event in events if isinstance(event, PoolScaled)]
    assert sizes[:2] == [(2, 0), (0, 2)]
