"""Head of a detached pool that is killed: its next process reaches the other nodes over channels of the client."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import NodeLost
from skyward.testing.engine_suite import appear, wait_for
from tests.engine.test_hosted_faults import children_of
from tests.engines import journaled_pool
from tests.waiting import until

_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[sky.ComputePool, list[sky.events.Event]]]:
    events: list[sky.events.Event] = []
    with journaled_pool(nodes=2, concurrency=3, logs=False, on_event=events.append) as pool:
        yield pool, events


def heads_below(process: int) -> list[int]:
    """Return the standby of the head below a process, its watchdog and the head: all look the same."""
    own = [pid for pid, line in children_of(process).items() if "skyward.engine.head.main" in line]
    return [own[0], *heads_below(own[0])] if own else []


def kill_head(*, with_process: int = 0) -> None:
    """Kill the head, once it is there, and perhaps another process first, of which it does not learn."""
    found: list[int] = []

    def is_there() -> bool:
        found[:] = heads_below(os.getpid())
        return len(found) == 3  # one that was killed may not have begun again

    until(is_there)
    head = found[-1]
    if with_process:
        os.kill(head, signal.SIGSTOP)
        os.kill(with_process, signal.SIGKILL)
    os.kill(head, signal.SIGKILL)


def test_calls_of_all_nodes_go_on_over_lent_channels(
    opened: tuple[sky.ComputePool, list[sky.events.Event]], tmp_path: Path
) -> None:
    pool, events = opened

    def wait(number: int) -> int:
        with open(tmp_path / f"began-{number}", "a", encoding="ascii") as file:
            file.write("x")
        wait_for(tmp_path / "go")
        return number

    @sky.compute
    def count() -> Iterator[bytes]:
        for number in range(40):
            yield bytes([number]) * 100_000

    agents = pool.agent_pids()
    stream = iter(count() >> pool.node(1))
    taken = [next(stream)[0] for _ in range(10)]
    running = [sky.compute(wait)(node) > pool.node(node) for node in range(2)]
    gang = sky.compute(wait).with_options(nodes=2)(20) > pool
    waiting = [sky.compute(wait)(number) > pool for number in range(2, 10)]
    for number in (0, 1, 20):
        wait_for(tmp_path / f"began-{number}")
    until(lambda: (tmp_path / "began-20").read_text() == "xx")
    kill_head()
    late = [sky.compute(wait)(number) > pool for number in range(10, 14)]
    given_up = sky.compute(wait)(14) > pool.node(1)
    given_up.cancel()
    appear(tmp_path / "go")
    assert [future.result(_LIMIT_S) for future in running + waiting + late] == list(range(14))
    assert gang.result(_LIMIT_S) == [20, 20]
    assert (tmp_path / "began-20").read_text() == "xx", "its ranks have gone on"
    assert taken + [item[0] for item in stream] == list(range(40))
    assert [(tmp_path / f"began-{number}").read_text() for number in range(14)] == ["x"] * 14
    assert sky.compute(abs)(-1) @ pool == [1, 1]
    assert pool.agent_pids() == agents
    assert not [event for event in events if isinstance(event, sky.events.NodeLost)]


def test_each_item_of_an_iterator_reaches_a_call_once_and_in_order(
    opened: tuple[sky.ComputePool, list[sky.events.Event]], tmp_path: Path
) -> None:
    pool, _ = opened
    count = 300

    @sky.compute
    def read(items: Iterator[int], number: int) -> list[int]:
        read = []
        for item in items:
            read.append(item)
            if len(read) == 20:
                appear(tmp_path / f"read-{number}")
            time.sleep(0.002)
        return read

    @sky.compute
    def echo(items: Iterator[bytes]) -> Iterator[bytes]:
        yield from items

    stream = iter(echo(bytes([number]) * 300_000 for number in range(40)) >> pool.node(1))
    echoed = [next(stream)[0] for _ in range(3)]
    futures = [read(iter(range(count)), number) > pool for number in range(8)]
    until(lambda: len(list(tmp_path.glob("read-*"))) == 5)  # the others wait for a slot
    kill_head()
    echoed += [next(stream)[0] for _ in range(17)]
    kill_head()
    echoed += [item[0] for item in stream]
    assert echoed == list(range(40))
    assert [future.result(_LIMIT_S) for future in futures] == [list(range(count))] * 8


def test_a_node_that_is_lost_with_the_head_is_replaced(
    opened: tuple[sky.ComputePool, list[sky.events.Event]], tmp_path: Path
) -> None:
    pool, events = opened

    def wait(number: int) -> int:
        appear(tmp_path / f"began-{number}")
        wait_for(tmp_path / "go")
        return number

    safe = sky.compute(wait)(0) > pool.node(0)
    lost = sky.compute(wait)(1) > pool.node(1)
    for number in range(2):
        wait_for(tmp_path / f"began-{number}")
    began = time.monotonic()
    kill_head(with_process=pool.agent_pids()[1])
    with pytest.raises(NodeLost, match="may have begun"):
        lost.result(_LIMIT_S)
    assert time.monotonic() - began < _LIMIT_S / 2 - 5, "nobody waits for an agent that is gone"
    appear(tmp_path / "go")
    assert safe.result(_LIMIT_S) == 0
    assert sky.compute(abs)(-1) @ pool == [1, 1]
    (event,) = [event for event in events if isinstance(event, sky.events.NodeLost)]
    assert (event.node, event.will_be_replaced) == (1, True)
