"""Elastic pools: they grow while calls wait, shrink when they are idle, and interrupt nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import InternalError, NoCapacity, NodeLost, PoolClosed, RefLost, UsageError
from skyward.events import Emit, Event, PoolScaled, ScalingFailed
from skyward.pool import scaler
from skyward.testing import Faults
from skyward.values.machine import Machine, Offer, PoolSpec
from tests.engines import hosted_pool, is_moving
from tests.waiting import until


@sky.compute
def place() -> tuple[int, int, int | None]:
    info = sky.instance_info()
    assert info is not None
    return info.node, info.total_nodes, info.parts


@sky.compute
def hold(file: Path) -> int:
    """Say that the call runs, and end once the file is there."""
    info = sky.instance_info()
    assert info is not None
    file.with_name(f"running-{info.node}").touch()
    until(file.exists, 60)
    return info.node


@dataclass
class Elastic:
    """A pool of one to three nodes, and what it told."""

    pool: sky.ComputePool
    events: list[Event] = field(default_factory=list)

    def sizes(self) -> list[tuple[int, int]]:
        return [(e.before, e.nodes) for e in self.events if isinstance(e, PoolScaled)]


@pytest.fixture(scope="module", params=[sky.ComputePool, hosted_pool], ids=["direct", "hosted"])
def made(request: pytest.FixtureRequest) -> Iterator[Elastic]:
    events: list[Event] = []
    pool = request.param(
        sky.Local(), nodes=(1, 3), idle_timeout_s=60.0, logs=False, console=False, on_event=events.append
    )
    with pool:
        yield Elastic(pool, events)


@pytest.fixture
def elastic(made: Elastic) -> Elastic:
    made.pool.scale(1)
    until(lambda: len(made.pool.agent_pids()) == made.pool.nodes == 1)
    made.pool.scale(None)
    made.events.clear()
    return made


def test_a_pool_is_scaled_up_and_down_and_broadcasts_take_the_nodes_that_are_there(elastic: Elastic) -> None:
    pool = elastic.pool
    pool.scale(3)
    assert pool.nodes == 3
    assert place() @ pool == [(0, 3, 3), (1, 3, 3), (2, 3, 3)]
    pool.scale(2)
    until(lambda: pool.nodes == 2)
    assert place() @ pool == [(0, 2, 2), (1, 2, 2)]
    assert pool.total_slots == 3
    until(lambda: elastic.sizes()[-2:] == [(1, 3), (3, 2)])


def test_calls_in_flight_are_not_interrupted_when_a_pool_shrinks(elastic: Elastic, tmp_path: Path) -> None:
    pool, go = elastic.pool, tmp_path / "go"
    pool.scale(3)
    running = [hold(go) > pool for _ in range(3)]
    until(lambda: len(list(tmp_path.glob("running-*"))) == 3)
    pool.scale(1)
    until(lambda: pool.nodes == 1)  # the other two get no new calls
    assert len(pool.agent_pids()) == 3
    go.touch()
    assert sorted(future.result(60) for future in running) == [0, 1, 2]
    until(lambda: len(pool.agent_pids()) == 1)


def test_nodes_that_are_leaving_stay_when_they_are_wanted_again(elastic: Elastic, tmp_path: Path) -> None:
    pool, go = elastic.pool, tmp_path / "go"
    pool.scale(3)
    running = [hold(go) > pool for _ in range(3)]
    until(lambda: len(list(tmp_path.glob("running-*"))) == 3)
    pids = pool.agent_pids()
    pool.scale(1)
    until(lambda: pool.nodes == 1)
    pool.scale(3)
    assert pool.nodes == 3
    go.touch()
    assert sorted(future.result(60) for future in running) == [0, 1, 2]
    assert place() @ pool == [(0, 3, 3), (1, 3, 3), (2, 3, 3)]
    assert pool.agent_pids() == pids
    assert [size for size in elastic.sizes() if size[0] < size[1]] == [(1, 3)]


def test_a_call_that_names_a_node_that_is_leaving_runs_there(elastic: Elastic, tmp_path: Path) -> None:
    pool, go = elastic.pool, tmp_path / "go"
    pool.scale(2)
    running = [hold(go) > pool for _ in range(2)]
    until(lambda: len(list(tmp_path.glob("running-*"))) == 2)
    pool.scale(1)
    until(lambda: pool.nodes == 1)
    named = place() > pool.node(1)
    go.touch()
    assert sorted(future.result(60) for future in running) == [0, 1]
    assert named.result(60)[0] == 1
    until(lambda: len(pool.agent_pids()) == 1)


def test_a_running_gang_keeps_its_nodes_when_the_pool_shrinks(elastic: Elastic, tmp_path: Path) -> None:
    pool, go = elastic.pool, tmp_path / "go"
    pool.scale(3)
    gang = hold.with_options(nodes=2)(go) > pool
    until(lambda: len(list(tmp_path.glob("running-*"))) == 2)
    pool.scale(1)
    until(lambda: len(pool.agent_pids()) == 2)  # the node beside the gang
    assert not gang.done()
    go.touch()
    assert len(set(gang.result(60))) == 2
    until(lambda: len(pool.agent_pids()) == 1)


@sky.actor
class Tally(sky.ActorBase):
    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total


def test_the_node_of_an_actor_is_in_use_until_the_actor_ends(elastic: Elastic) -> None:
    pool = elastic.pool
    pool.scale(2)
    tally: Any = Tally() >> pool.node(1)
    assert tally.add(1) >> pool == 1
    pool.scale(1)
    until(lambda: pool.nodes == 1)
    assert 1 in pool.agent_pids()
    assert tally.add(2) >> pool == 3
    tally.close()
    until(lambda: len(pool.agent_pids()) == 1)


def test_waiting_calls_get_further_nodes(elastic: Elastic, tmp_path: Path) -> None:
    pool, go = elastic.pool, tmp_path / "go"
    waiting = [hold(go) > pool for _ in range(3)]
    until(lambda: len(list(tmp_path.glob("running-*"))) == 3)  # each on a node of its own
    go.touch()
    assert sorted(future.result(60) for future in waiting) == [0, 1, 2]
    grown = [event for event in elastic.events if isinstance(event, PoolScaled) and event.before < event.nodes]
    assert grown[0].before == 1
    assert "wait" in grown[0].reason


def test_a_gang_that_is_larger_than_the_pool_gets_its_nodes(elastic: Elastic) -> None:
    assert sorted(place.with_options(nodes=3)() >> elastic.pool) == [(0, 3, 3), (1, 3, 3), (2, 3, 3)]
    assert elastic.pool.nodes == 3


def test_a_call_to_a_node_that_is_not_there_brings_it(elastic: Elastic) -> None:
    assert elastic.pool.node(2).run(place())[0] == 2
    assert 2 in elastic.pool.agent_pids()


@sky.compute
def block(number: int) -> bytes:
    return bytes([number]) * 3_000_000


@sky.compute
def first(data: bytes) -> tuple[int, int, int]:
    return data[0], len(data), place.local()[0]


def test_values_that_stay_move_before_their_node_is_given_back(elastic: Elastic) -> None:
    pool = elastic.pool
    pool.scale(3)
    refs: list[sky.Ref[bytes]] = [block(node).keep() >> pool.node(node) for node in range(3)]
    refs += [block(2).keep() >> pool.node(2), pool.put(bytes([4]) * 3_000_000, nodes=[1, 2])]
    pool.scale(1)
    until(lambda: len(pool.agent_pids()) == 1)
    assert [first(ref) >> pool for ref in refs] == [(number, 3_000_000, 0) for number in (0, 1, 2, 2, 4)]
    assert [ref.nodes for ref in refs] == [(0,)] * 5
    assert [ref.get()[0] for ref in refs] == [0, 1, 2, 2, 4]


def test_a_node_with_a_value_stays_if_no_other_can_take_it() -> None:
    with sky.ComputePool(sky.Local(), nodes=(0, 2), idle_timeout_s=0.3, logs=False, console=False) as pool:
        pool.scale(2)
        kept = block(1).keep() >> pool.node(1)
        pool.scale(None)
        until(lambda: list(pool.agent_pids()) == [1])
        with pytest.raises(AssertionError, match="not within"):
            until(lambda: rests(pool), 1.5)
        assert first(kept) >> pool == (1, 3_000_000, 1)
        kept.drop()
        until(lambda: rests(pool))


@pytest.mark.parametrize("killed", [0, 2], ids=["the target", "the source"])
def test_a_node_that_is_killed_while_values_move_loses_at_most_its_own(killed: int) -> None:
    with sky.ComputePool(sky.Local(), nodes=(2, 3), idle_timeout_s=60.0, logs=False, console=False) as pool:
        faults = Faults(pool)
        for number in range(3):
            pool.scale(3)
            until(lambda: len(pool.agent_pids()) == 3)
            faults.wait_until_whole()
            # Nodes without values are given back first, and values go to the node that has the least bytes.
            beside = [block(node).keep() >> pool.node(node) for node in (0, 1, 1)]
            beside[2] = block(9).keep() >> pool.node(1)
            moving = block(number + 20).keep() >> pool.node(2)
            agent = pool.agent_pids()[killed]
            os.kill(agent, signal.SIGSTOP)  # a move that has begun cannot end now
            pool.scale(2)
            until(partial(is_moving, pool, moving))
            os.kill(agent, signal.SIGKILL)
            assert first(beside[2]).with_timeout(60) >> pool == (9, 3_000_000, 1)
            if killed == 2:
                with pytest.raises(RefLost):
                    moving.get()
            else:
                assert moving.get()[0] == number + 20
                until(lambda: sorted(pool.agent_pids()) == [0, 1])
                assert moving.get()[0] == number + 20


def test_a_lost_node_of_an_elastic_pool_is_replaced(elastic: Elastic) -> None:
    elastic.pool.scale(2)
    Faults(elastic.pool).kill_node(1)
    assert elastic.pool.node(1).run(place.with_options(retries=1)())[0] == 1
    assert elastic.pool.nodes == 2


def test_a_number_outside_the_bounds_is_refused(elastic: Elastic) -> None:
    with pytest.raises(UsageError, match=r"scale.nodes=4: .* from 1 to 3; pass one, or None"):
        elastic.pool.scale(4)
    fixed = sky.ComputePool(sky.Local(), nodes=2)
    with pytest.raises(UsageError, match=r"fixed size of 2; open it with nodes=\(min, max\)"):
        fixed.scale(1)
    with pytest.raises(PoolClosed):
        sky.ComputePool(sky.Local(), nodes=(1, 2)).scale(2)


# Failures while growing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Small(sky.Local):
    """Provider with room for a number of machines, which can be changed."""

    room: list[int]
    launches: list[int] = field(default_factory=list)
    hangs: threading.Event = field(default_factory=threading.Event)
    is_waiting: threading.Event = field(default_factory=threading.Event)

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        self.launches.append(len(nodes))
        if self.hangs.is_set():
            self.is_waiting.set()
            assert spec.stop.wait(60)
            raise NoCapacity("small: told to stop")
        if self.room[0] < len(nodes):
            raise NoCapacity(f"small: room for {self.room[0]} machines")
        self.room[0] -= len(nodes)
        return super().launch(spec, offers, pool, nodes, emit)


def test_a_pool_goes_on_with_the_nodes_it_gets_and_says_so_once(tmp_path: Path) -> None:
    provider, events, go = Small(room=[2]), list[Event](), tmp_path / "go"
    with sky.ComputePool(provider, nodes=(1, 4), logs=False, console=False, on_event=events.append) as pool:
        with pytest.raises(NoCapacity, match="room for 1"):
            pool.scale(4)
        assert pool.nodes == 2
        waiting = [hold(go) > pool for _ in range(4)]
        until(lambda: len(list(tmp_path.glob("running-*"))) == 2)
        tried = len(provider.launches)
        with pytest.raises(NodeLost):
            pool.node(3).run(place())  # it is told at once, and does not wait for a node that nobody has
        go.touch()
        assert [future.result(60) for future in waiting]
        assert len(provider.launches) == tried + 1
    failures = [event for event in events if isinstance(event, ScalingFailed)]
    assert [(event.nodes, event.wanted) for event in failures] == [(2, 4), (2, 3)]
    assert "room for" in failures[0].reason


_NONE = NoCapacity("refusing: none now")


@dataclass(frozen=True, kw_only=True)
class Refusing(sky.Local):
    """Provider that refuses as many launches as `refusals` says."""

    refusals: list[int]
    error: Exception = _NONE

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        if self.refusals[0]:
            self.refusals[0] -= 1
            raise self.error
        return super().launch(spec, offers, pool, nodes, emit)


def test_error_of_a_provider_that_fails_in_its_own_way_is_told_to_whoever_asks() -> None:
    provider = Refusing(refusals=[0], error=TimeoutError("no answer"))
    with sky.ComputePool(provider, nodes=(1, 2), logs=False, console=False) as pool:
        provider.refusals[0] = 1
        with pytest.raises(InternalError, match=r"its size cannot be changed \(TimeoutError: no answer\)"):
            pool.scale(2)
        pool.scale(2)
        assert pool.nodes == 2


def test_an_error_that_nobody_foresaw_is_a_refusal_so_nothing_is_launched_again_at_once(tmp_path: Path) -> None:
    provider, events, go = Refusing(refusals=[0], error=TimeoutError("no answer")), list[Event](), tmp_path / "go"
    with sky.ComputePool(provider, nodes=(1, 2), logs=False, console=False, on_event=events.append) as pool:
        provider.refusals[0] = 9
        waiting = [hold(go) > pool for _ in range(4)]
        until(lambda: any(isinstance(event, ScalingFailed) for event in events))
        go.touch()
        assert [future.result(60) for future in waiting] == [0] * 4
        assert provider.refusals == [8]
    assert [event.nodes for event in events if isinstance(event, ScalingFailed)] == [1]


@pytest.mark.parametrize("refusals", [1, 3])
def test_another_node_comes_for_one_that_is_lost_for_good(refusals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler, "REFUSAL_S", 0.5)
    provider = Refusing(refusals=[0])
    with sky.ComputePool(provider, nodes=(1, 3), idle_timeout_s=60.0, logs=False, console=False) as pool:
        pool.scale(2)
        provider.refusals[0] = refusals
        killed = Faults(pool).kill_node(1)
        until(lambda: len(pool.agent_pids()) == 2 and killed not in pool.agent_pids().values())
        assert provider.refusals == [0]
        assert pool.nodes == 2


def test_a_pool_that_is_closed_while_it_grows_ends_the_launch() -> None:
    provider = Small(room=[9])
    errors: list[BaseException] = []
    with sky.ComputePool(provider, nodes=(1, 2), logs=False, console=False) as pool:
        provider.hangs.set()

        def scale() -> None:
            try:
                pool.scale(2)
            except PoolClosed as error:
                errors.append(error)

        thread = threading.Thread(target=scale)
        thread.start()
        assert provider.is_waiting.wait(60)
    thread.join(60)
    assert [type(error) for error in errors] == [PoolClosed]


# Idle pools ---------------------------------------------------------------------------------------------------------


def rests(pool: sky.ComputePool) -> bool:
    return not pool.agent_pids()


def test_an_idle_pool_of_a_fixed_size_rests_and_comes_back_whole() -> None:
    events: list[Event] = []
    pool = sky.ComputePool(sky.Local(), nodes=2, idle_timeout_s=0.3, logs=False, console=False, on_event=events.append)
    with pool:
        until(lambda: rests(pool))
        assert pool.nodes == 2
        assert place() @ pool == [(0, 2, 2), (1, 2, 2)]
        until(lambda: rests(pool))
        assert sorted(pool.map(abs, range(-3, 0))) == [1, 2, 3]
        until(lambda: rests(pool))
        assert place() >> pool.node(1) == (1, 2, None)
        until(lambda: rests(pool))
    sizes = [(e.before, e.nodes) for e in events if isinstance(e, PoolScaled)]
    assert sizes[:2] == [(2, 0), (0, 2)]
    assert set(sizes) <= {(2, 0), (0, 2), (1, 2), (2, 1), (1, 0)}


def test_a_pool_with_min_0_rents_at_its_first_call(tmp_path: Path) -> None:
    with sky.ComputePool(sky.Local(), nodes=(0, 2), idle_timeout_s=0.3, logs=False, console=False) as pool:
        assert rests(pool)
        assert pool.nodes == 0
        assert place() @ pool == [(0, 1, 1)]
        until(lambda: rests(pool))
        running = hold(tmp_path / "go") > pool
        until((tmp_path / "running-0").exists)
        assert pool.nodes == 1
        (tmp_path / "go").touch()
        assert running.result(60) == 0
        until(lambda: rests(pool))
        assert place() >> pool == (0, 1, None)


def test_the_next_call_brings_a_node_to_a_pool_that_was_told_to_have_none() -> None:
    with sky.ComputePool(sky.Local(), nodes=(0, 2), idle_timeout_s=60.0, logs=False, console=False) as pool:
        pool.scale(1)
        pool.scale(0)
        until(lambda: rests(pool))
        assert (place() > pool).result(60)[0] == 0
        pool.scale(0)
        until(lambda: rests(pool))
        assert len(place() @ pool) == 1


@dataclass(frozen=True, kw_only=True)
class Slow(sky.Local):
    """Provider whose further machines take longer than the pools' idle timeout."""

    seconds: float

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        if 0 not in nodes:
            time.sleep(self.seconds)
        return super().launch(spec, offers, pool, nodes, emit)


def test_the_idle_timeout_begins_when_the_new_nodes_are_there() -> None:
    events: list[Event] = []
    options: dict[str, Any] = {"logs": False, "console": False, "on_event": events.append}

    def sizes() -> list[PoolScaled]:
        return [event for event in events if isinstance(event, PoolScaled)]

    with sky.ComputePool(Slow(seconds=4.0), nodes=(1, 2), idle_timeout_s=3.0, **options) as pool:
        pool.scale(2)
        until(lambda: len(sizes()) == 2)
        assert pool.nodes == 1
    grown, shrunk = sizes()
    assert (grown.nodes, shrunk.removed) == (2, (1,))
    assert shrunk.at - grown.at > 6.9, "4 s until the node is there, then the idle timeout of 3 s"


def test_an_idle_pool_closes_if_its_user_says_so() -> None:
    pool = sky.ComputePool(sky.Local(), nodes=1, idle_timeout_s=0.2, on_idle="close", logs=False, console=False).start()
    until(lambda: not pool.is_active)
    with pytest.raises(PoolClosed, match=r"idle for idle_timeout_s=0.2"):
        place() >> pool
    pool.close()


def test_calls_fail_with_the_providers_error_if_a_pool_cannot_come_back() -> None:
    provider = Small(room=[1])
    with sky.ComputePool(provider, nodes=1, idle_timeout_s=0.2, logs=False, console=False) as pool:
        until(lambda: rests(pool))
        with pytest.raises(NoCapacity, match="room for 0"):
            place() >> pool
        with pytest.raises(NoCapacity, match="room for 0"):
            place() @ pool
        provider.room[0] = 1
        assert place() >> pool == (0, 1, None)
