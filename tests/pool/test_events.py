"""Events of a pool, for an iterator and for a function."""

from __future__ import annotations

import os
import signal
import threading

import pytest

import skyward as sky
from skyward import events
from skyward.integrations.base import integrate
from tests.channels import Relayed
from tests.pools_with_gpus import Plain


def kinds(seen: list[events.Event]) -> list[str]:
    return [type(event).__name__ for event in seen if not isinstance(event, events.NodeUsage)]


@sky.compute
def double(x: int) -> int:
    return 2 * x


@sky.compute
def fail() -> None:
    raise ValueError("no")


def test_a_pool_reports_its_life_from_start_to_end() -> None:
    seen: list[events.Event] = []
    with sky.ComputePool(sky.Local(), nodes=2, on_event=seen.append) as pool:
        assert double(2) >> pool == 4
    assert kinds(seen)[:4] == ["PoolStarted", "NodeReady", "NodeReady", "PoolReady"]
    assert kinds(seen)[-1] == "PoolClosed"
    started, ready, closed = seen[0], seen[3], seen[-1]
    assert isinstance(started, events.PoolStarted)
    assert (started.provider, started.nodes) == ("local", 2)
    assert isinstance(ready, events.PoolReady)
    assert isinstance(closed, events.PoolClosed)
    assert 0 < ready.seconds < closed.seconds
    assert closed.reason == ""


def test_events_can_be_read_by_another_thread_until_the_pool_is_closed() -> None:
    pool = sky.ComputePool(sky.Local())
    seen: list[events.Event] = []
    stream = pool.events()
    reader = threading.Thread(target=lambda: seen.extend(stream))
    reader.start()
    with pool:
        double(1) >> pool
    reader.join(60)
    assert not reader.is_alive()
    assert kinds(seen) == ["PoolStarted", "NodeReady", "PoolReady", "TaskSent", "TaskEnded", "PoolClosed"]


def test_calls_are_reported_with_name_node_outcome_and_time() -> None:
    with sky.ComputePool(sky.Local(), nodes=2) as pool:
        stream = pool.events()
        double(1) >> pool
        with pytest.raises(ValueError, match="no"):
            fail() >> pool
        double(3) @ pool
        pool.map(double, range(100))
    told = list(stream)
    sent = [event for event in told if isinstance(event, events.TaskSent)]
    ended = [event for event in told if isinstance(event, events.TaskEnded)]
    assert [event.task for event in sent if event.name != "double"] == [event.task for event in ended if not event.ok]
    assert {event.task for event in sent} == {event.task for event in ended}  # one may be taken back and sent again
    assert len({event.task for event in ended}) == len(ended)
    assert sum(event.calls for event in ended if event.ok) == 1 + 2 + 100
    assert {event.node for event in ended} == {0, 1}
    assert all(event.seconds > 0 for event in ended)


def test_each_rank_of_a_gang_is_reported() -> None:
    def one() -> int:
        return 1

    rank = sky.compute(integrate(one, Plain()))
    with sky.ComputePool(sky.Local(), nodes=2) as pool:
        stream = pool.events()
        rank() @ pool
    ended = [event for event in stream if isinstance(event, events.TaskEnded)]
    assert sorted((event.rank, event.node, event.ok) for event in ended) == [(0, 0, True), (1, 1, True)]


def test_a_lost_node_and_its_replacement_are_reported() -> None:
    with sky.ComputePool(sky.Local(), nodes=2, logs=False) as pool:
        stream = pool.events()
        os.kill(pool.agent_pids()[1], signal.SIGKILL)
        lost = next(event for event in stream if isinstance(event, events.NodeLost))
        replaced = next(event for event in stream if isinstance(event, events.NodeReplaced))
        assert (lost.node, lost.will_be_replaced, replaced.node) == (1, True, 1)
        assert replaced.seconds > 0


def test_a_pool_that_cannot_start_says_why_and_ends_its_streams() -> None:
    pool = sky.ComputePool(sky.Local(), vcpus=100_000)
    stream = pool.events()
    with pytest.raises(sky.errors.NoCapacity):
        pool.start()
    *_, closed = stream
    assert isinstance(closed, events.PoolClosed)
    assert "vcpus=100000" in closed.reason


def test_a_reader_of_a_pool_that_never_opens_does_not_wait_indefinitely() -> None:
    pool = sky.ComputePool(sky.Local())
    stream = pool.events()
    del pool
    assert list(stream) == []


def test_a_closed_pool_reports_again_when_it_is_reopened() -> None:
    pool = sky.ComputePool(sky.Local())
    for _ in range(2):
        stream = pool.events()
        with pool:
            pass
        assert kinds(list(stream)) == ["PoolStarted", "NodeReady", "PoolReady", "PoolClosed"]


def test_a_link_that_breaks_and_reconnects_is_reported() -> None:
    provider = Relayed()
    with sky.ComputePool(provider, logs=False) as pool:
        stream = pool.events()
        provider.break_links()
        assert double(2) >> pool == 4
        cut = next(event for event in stream if isinstance(event, events.LinkLost))
        restored = next(event for event in stream if isinstance(event, events.LinkRestored))
        assert (cut.node, restored.node) == (0, 0)
        assert restored.seconds > 0
    assert not [event for event in stream if isinstance(event, events.NodeLost)]
