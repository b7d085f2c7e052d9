"""Pools whose head is lost for good: another head goes on with their calls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.engine import other_heads
from skyward.engine.head.messages import HeadConfig
from skyward.engine.head.place import HeadPlace, LocalHead, head_on
from skyward.engine.hosted import HostedEngine
from skyward.engine.other_heads import OtherHeads
from skyward.errors import ActorLost, NodeLost, RefLost, StateLost
from skyward.testing.engine_suite import appear, wait_for
from skyward.values.machine import Machine
from tests.engine.test_hosted_faults import heads_of
from tests.engines import gated_pool, hosted_pool, permitted_calls
from tests.waiting import until, until_text

_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with hosted_pool(nodes=2, concurrency=2, logs=False) as pool:
        yield pool


def kill_head(*others: int, with_process: int = 0) -> None:
    """Kill the head of a pool, once it is there, and perhaps another process first, of which it does not learn.

    Args:
        others: Heads of other pools.
        with_process: The other process.
    """
    found: list[int] = []

    def is_alone() -> bool:
        """Return whether there is one head: on a busy machine, one that began too slowly is still about to end."""
        found[:] = set(heads_of(os.getpid())) - set(others)
        return len(found) == 1

    until(is_alone)
    (head,) = found
    if with_process:
        os.kill(head, signal.SIGSTOP)
        os.kill(with_process, signal.SIGKILL)
    os.kill(head, signal.SIGKILL)


def test_running_calls_go_on_and_waiting_ones_begin_once(pool: sky.ComputePool, tmp_path: Path) -> None:
    def wait(number: int) -> int:
        with open(tmp_path / f"began-{number}", "a", encoding="ascii") as file:
            file.write("x")
        wait_for(tmp_path / "go")
        return number

    agents = pool.agent_pids()

    @sky.compute
    def total(items: Iterator[int]) -> int:
        return sum(items)

    futures = [sky.compute(wait)(number) > pool for number in range(12)]
    fed = total(iter(range(100))) > pool
    while len(list(tmp_path.glob("began-*"))) < 4:
        time.sleep(0.01)
    kill_head()
    appear(tmp_path / "go")
    assert [future.result(_LIMIT_S) for future in futures] == list(range(12))
    assert fed.result(_LIMIT_S) == 4950
    assert [(tmp_path / f"began-{number}").read_text() for number in range(12)] == ["x"] * 12
    assert pool.agent_pids() == agents
    assert sky.compute(abs)(-1) @ pool == [1, 1]


def test_a_map_with_parts_goes_on_and_runs_nothing_twice(pool: sky.ComputePool, tmp_path: Path) -> None:
    def note(number: int) -> int:
        with open(tmp_path / str(number), "a", encoding="ascii") as file:
            file.write("x")
        time.sleep(0.002)
        return number

    taken = []
    for value in pool.map(note, range(1500)):
        taken.append(value)
        if len(taken) in (200, 700):
            kill_head()
    assert taken == list(range(1500))
    assert {(tmp_path / str(number)).read_text() for number in range(1500)} == {"x"}


def test_streams_and_large_values_come_whole(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def count() -> Iterator[bytes]:
        for number in range(40):
            yield bytes([number]) * 300_000

    def large() -> bytes:
        appear(tmp_path / "began")
        wait_for(tmp_path / "go")
        return b"x" * 3_000_000

    future = sky.compute(large)() > pool
    wait_for(tmp_path / "began")
    items = []
    for item in count() >> pool:
        items.append(item[0])
        assert len(item) == 300_000
        if len(items) == 10:
            kill_head()
    appear(tmp_path / "go")
    assert items == list(range(40))
    assert len(future.result(_LIMIT_S)) == 3_000_000


def test_kept_values_stay_where_they_are(pool: sky.ComputePool, tmp_path: Path) -> None:
    def make(number: int) -> bytes:
        return bytes([number]) * 600_000

    def first(data: bytes) -> int:
        appear(tmp_path / "began")
        wait_for(tmp_path / "go")
        return data[0]

    def make_late() -> bytes:
        first(b"7")
        return b"7" * 600_000

    kept = [sky.compute(make)(number).keep() >> pool.node(number) for number in (0, 1)]
    put, unused = pool.put(b"5" * 600_000), pool.put(b"6" * 600_000)
    assert sky.compute(len)(put) >> pool.node(1) == 600_000
    running: list[Any] = [sky.compute(first)(kept[0]) > pool, sky.compute(make_late)().keep() > pool]
    wait_for(tmp_path / "began")
    until(lambda: all(future.running() for future in running))
    waiting = [sky.compute(first)(ref) > pool for ref in (*kept, put, unused)]
    kill_head()
    assert [ref.get()[0] for ref in (kept[1], unused)] == [1, ord("6")]
    appear(tmp_path / "go")
    assert running[0].result(_LIMIT_S) == 0
    late = running[1].result(_LIMIT_S)
    assert [future.result(_LIMIT_S) for future in waiting] == [0, 1, ord("5"), ord("6")]
    kill_head()
    assert all(ref.nodes for ref in (*kept, put, unused, late))
    assert [ref.get()[0] for ref in (*kept, put, unused, late)] == [0, 1, ord("5"), ord("6"), ord("7")]
    assert sky.compute(len)(late) @ pool == [600_000] * 2


def test_running_calls_get_each_item_of_their_iterators_once(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def read(name: str, items: Iterator[bytes], more: Iterator[int]) -> Iterator[int]:
        for number, item in enumerate(items):
            if number % 20 == 10:
                appear(tmp_path / f"{name}-{number}")
                wait_for(tmp_path / f"go-{number}")
            yield item[0]
        yield sum(more)

    def items(size: int) -> Iterator[bytes]:
        for number in range(60):
            yield bytes([number]) * size

    @sky.compute
    def total(items: Iterator[int]) -> int:
        return sum(items)

    sizes = {"small": 1, "large": 300_000}
    streams = [read(name, items(size), iter(range(100))) > pool for name, size in sizes.items()]
    waiting = [total(iter(range(100))) > pool for _ in range(8)]
    with ThreadPoolExecutor(2) as readers:
        values = [readers.submit(lambda stream: list(stream.result(_LIMIT_S)), stream) for stream in streams]
        for number in (10, 30, 50):
            for name in sizes:
                wait_for(tmp_path / f"{name}-{number}")
            kill_head()
            appear(tmp_path / f"go-{number}")
        assert [future.result(_LIMIT_S) for future in values] == [[*range(60), 4950]] * 2
    assert [future.result(_LIMIT_S) for future in waiting] == [4950] * 8


class Counter:
    """Actor that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def more(self) -> int:
        self.count += 1
        return self.count

    def pid(self) -> int:
        return os.getpid()

    def wait(self, folder: Path) -> int:
        appear(folder / "began")
        wait_for(folder / "go")
        return self.more()


def test_actors_go_on_with_their_calls_in_order(pool: sky.ComputePool, tmp_path: Path) -> None:
    counter: Any = sky.actor(Counter)() >> pool.node(1)
    booked: Any = sky.actor(Counter).with_options(name="booked", cpus=0.5)() >> pool
    assert [counter.more() >> pool, booked.more() >> pool] == [1, 1]
    running = counter.wait(tmp_path) > pool
    waiting = [counter.more() > pool for _ in range(5)]
    wait_for(tmp_path / "began")
    kill_head()
    early = [counter.more() > pool for _ in range(5)]
    kill_head()
    late: Any = sky.actor(Counter)() > pool
    appear(tmp_path / "go")
    assert [future.result(_LIMIT_S) for future in (running, *waiting, *early)] == list(range(2, 13))
    assert [pool.actor("booked").more() >> pool, booked.more() >> pool] == [2, 3]
    assert late.result(_LIMIT_S).more() >> pool == 1
    pids = [counter.pid() >> pool, booked.pid() >> pool]
    booked.close()
    kill_head()
    assert counter.more() >> pool == 13
    del counter
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_an_actor_that_is_not_made_yet_restarts_or_is_lost(pool: sky.ComputePool, tmp_path: Path) -> None:
    class Slow:
        def __init__(self, name: str) -> None:
            with open(tmp_path / name, "a", encoding="ascii") as file:
                file.write("x")
            wait_for(tmp_path / "go")

        def again(self, counter: Any) -> int:
            try:
                value: int = counter.wait(tmp_path) >> pool
            except NodeLost:
                return -1
            return value

    made: list[Any] = [sky.actor(Slow).with_options(max_restarts=count)(str(count)) > pool for count in (0, 1)]
    for count in (0, 1):
        wait_for(tmp_path / str(count))
    kill_head()
    with pytest.raises(ActorLost, match="killed"):
        made[0].result(_LIMIT_S)
    until(lambda: (tmp_path / "1").read_text() == "xx")
    appear(tmp_path / "go")
    slow: Any = made[1].result(_LIMIT_S)
    (tmp_path / "go").unlink()
    counter: Any = sky.actor(Counter)() >> pool
    nested = slow.again(counter) > pool
    wait_for(tmp_path / "began")
    kill_head()
    appear(tmp_path / "go")
    assert nested.result(_LIMIT_S) == -1, "calls of tasks end with their head"
    assert counter.more() >> pool == 2, "the actor does not"


def test_state_that_only_the_head_had_is_lost_with_an_error(pool: sky.ComputePool, tmp_path: Path) -> None:
    def use(before: str, go: str) -> str:
        sky.event(before).set()
        appear(tmp_path / "used")
        wait_for(Path(go))
        try:
            sky.event(before).set()
        except StateLost as error:
            return str(error)
        return "is there"

    pool.event("steps").set()
    running = sky.compute(use)("of a task", str(tmp_path / "go")) > pool
    wait_for(tmp_path / "used")
    kill_head()
    appear(tmp_path / "go")
    assert "of a task" in running.result(_LIMIT_S)
    for name in ("steps", "of a task"):
        with pytest.raises(StateLost, match=name):
            pool.event(name).set()
    pool.event("other").set()
    assert pool.event("other").is_set()


def record_and_wait(folder: Path, name: str) -> int:
    """Note that a rank begins, wait for a word to it, and return how often its gang had started before."""
    info = sky.instance_info()
    assert info is not None
    rank = f"{name}-{info.node}-{info.restart_count}"
    with open(folder / rank, "a", encoding="ascii") as file:
        file.write("x")
    wait_for(folder / f"{rank}-go")
    if (folder / f"{rank}-go").read_text():
        raise ValueError(rank)
    return info.restart_count


def fail(rank: Path) -> None:
    """Let a rank of `record_and_wait` raise."""
    (rank.parent / "word").write_text("fail")
    (rank.parent / "word").rename(f"{rank}-go")


def test_running_gangs_go_on_and_waiting_ones_begin_once(pool: sky.ComputePool, tmp_path: Path) -> None:
    gang = sky.compute(record_and_wait).with_options(nodes=2)
    half = gang(tmp_path, "half") > pool
    again = gang.with_options(max_restarts=1)(tmp_path, "again") > pool
    until_text(tmp_path / "again-1-0")
    fail(tmp_path / "again-1-0")
    for name in ("half-0-0", "half-1-0", "again-0-1", "again-1-1"):
        until_text(tmp_path / name)
    waiting = [gang(tmp_path, name) > pool for name in ("fails", "late")]
    appear(tmp_path / "half-1-0-go")  # nobody but its node has the value of this rank
    kill_head()
    assert not waiting[0].running()
    kill_head()
    appear(tmp_path / "half-0-0-go")
    assert half.result(_LIMIT_S) == [0, 0]
    until_text(tmp_path / "fails-1-0")
    kill_head()
    fail(tmp_path / "fails-1-0")
    with pytest.raises(ValueError, match="fails-1-0"):
        waiting[0].result(_LIMIT_S)
    fail(tmp_path / "again-0-1")
    with pytest.raises(ValueError, match="again-0-1") as raised:
        again.result(_LIMIT_S)
    assert "started 2 times" in "".join(raised.value.__notes__)
    for name in ("late-0-0", "late-1-0"):
        appear(tmp_path / f"{name}-go")
    assert waiting[1].result(_LIMIT_S) == [0, 0]
    assert {path.read_text() for path in tmp_path.glob("*-[01]-[01]")} == {"x"}


def test_gangs_with_ranks_on_a_node_that_is_lost_with_the_head_start_again_if_they_may(tmp_path: Path) -> None:
    others = heads_of(os.getpid())
    gang = sky.compute(record_and_wait).with_options(nodes=2)
    with gated_pool(nodes=2, concurrency=3, logs=False) as pool:
        safe = gang.with_options(nodes=1)(tmp_path, "safe") > pool.node(1)
        lost = gang(tmp_path, "lost") > pool
        again = gang.with_options(max_restarts=1)(tmp_path, "again") > pool
        for name in ("safe-1-0", "lost-0-0", "lost-1-0", "again-0-0", "again-1-0"):
            until_text(tmp_path / name)
        waiting = gang(tmp_path, "late") > pool
        kill_head(*others, with_process=pool.agent_pids()[0])
        with pytest.raises(NodeLost, match="may have begun"):
            lost.result(_LIMIT_S)
        for name in ("safe-1-0", "again-0-1", "again-1-1", "late-0-0", "late-1-0"):
            appear(tmp_path / f"{name}-go")
        assert safe.result(_LIMIT_S) == [0]
        assert [again.result(_LIMIT_S), waiting.result(_LIMIT_S)] == [[1, 1], [0, 0]]
        assert {path.read_text() for path in tmp_path.glob("*-[01]-[01]")} == {"x"}


def test_only_heads_that_are_lost_soon_one_after_another_end_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    # No options: 33 heads would have to be killed here, or live for a minute.
    monkeypatch.setattr("skyward.engine.other_heads._MOST_CHANGES", 1)
    others, double = heads_of(os.getpid()), sky.compute(lambda x: 2 * x)
    with hosted_pool(nodes=1, concurrency=1, logs=False) as pool:
        monkeypatch.setattr("skyward.engine.other_heads._SOON_S", 0.0)  # no head is lost soon
        for _ in range(2):
            kill_head(*others)
            assert double.with_options(retries=3)(2) >> pool == 4
        monkeypatch.setattr("skyward.engine.other_heads._SOON_S", 600.0)  # each is
        kill_head(*others)
        with pytest.raises(NodeLost, match=r"head of the pool: is gone .*; open the pool again"):
            double(2) >> pool


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        pytest.param(TimeoutError("no answer within 60 s"), True, id="a machine hangs"),
        pytest.param(RuntimeError("a defect"), False, id="a defect"),
    ],
)
def test_a_head_that_cannot_begin_leaves_no_call_waiting(
    error: Exception, *, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, double = heads_of(os.getpid()), sky.compute(lambda x: 2 * x)

    class Failing(LocalHead):
        def start(self, config: HeadConfig) -> tuple[str, ...]:
            raise error

    def head_on_another(machine: Machine, config: HeadConfig) -> tuple[HeadConfig, HeadPlace]:
        """Return a place that fails beside the first two nodes, which are tried first."""
        config, place = head_on(machine, config)
        return config, place if machine.node == 2 else Failing()

    monkeypatch.setattr(other_heads, "head_on", head_on_another)
    with hosted_pool(nodes=3, concurrency=1, logs=False) as pool:
        assert double(1) >> pool == 2
        kill_head(*others)
        if goes_on:
            assert double.with_options(retries=3)(2) >> pool == 4
        else:
            with pytest.raises(NodeLost, match="head of the pool: is gone"):
                double(2) >> pool


def test_a_head_that_ends_because_the_pool_closes_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    others, changes, end = heads_of(os.getpid()), list[str](), HostedEngine._end

    def end_late(engine: HostedEngine, error: sky.errors.SkywardError) -> None:
        """End once the head has, and its end was noticed."""
        until(lambda: set(heads_of(os.getpid())) <= set(others))
        time.sleep(0.3)
        end(engine, error)

    monkeypatch.setattr(HostedEngine, "_end", end_late)  # nothing public lies between the two ends
    monkeypatch.setattr(OtherHeads, "change", lambda heads, link, why, **how: changes.append(why))
    with hosted_pool(nodes=1, logs=False) as pool:
        assert sky.compute(abs)(-2) >> pool == 2
    assert changes == []


def test_calls_that_wait_for_the_only_node_begin_although_it_is_lost_with_the_head(tmp_path: Path) -> None:
    others = heads_of(os.getpid())
    record = sky.compute(record_and_wait).with_options(timeout_s=_LIMIT_S)  # such calls wait in the head
    with gated_pool(nodes=1, concurrency=1, logs=False) as pool:
        lost = record(tmp_path, "lost") > pool
        waiting = [record(tmp_path, f"waiting-{number}") > pool for number in range(3)]
        wait_for(tmp_path / "lost-0-0")
        until(lambda: permitted_calls(pool) == 1)
        kill_head(*others, with_process=pool.agent_pids()[0])
        with pytest.raises(NodeLost, match="may have begun"):
            lost.result(_LIMIT_S)
        for number in range(3):
            appear(tmp_path / f"waiting-{number}-0-0-go")
        for future in waiting:
            future.result(_LIMIT_S)
        assert {path.read_text() for path in tmp_path.glob("waiting-?-0-0")} == {"x"}, "each ran once"


def test_calls_of_a_node_that_is_lost_with_the_head_are_in_doubt(tmp_path: Path) -> None:
    def wait(name: str) -> str:
        with open(tmp_path / name, "a", encoding="ascii") as file:
            file.write("x")
        wait_for(tmp_path / "go")
        return name

    others = heads_of(os.getpid())
    events: list[sky.events.Event] = []
    with hosted_pool(nodes=2, concurrency=1, logs=False, on_event=events.append) as pool:
        there: Any = sky.actor(Counter)() >> pool.node(1)
        gone: Any = sky.actor(Counter)() >> pool.node(0)
        back: Any = sky.actor(Counter).with_options(max_restarts=1)() >> pool.node(0)
        assert [actor.more() >> pool for actor in (there, gone, back)] == [1, 1, 1]
        calling: list[Any] = [actor.wait(tmp_path) > pool for actor in (there, gone, back)]
        wait_for(tmp_path / "began")
        until(lambda: all(future.running() for future in calling))
        kept = [sky.compute(bytes)(600_000).keep() >> pool.node(node) for node in (0, 1)]
        kept.append(sky.compute(bytes)(700_000).keep() >> pool.node(0))
        put = pool.put(b"x" * 600_000, nodes=[0])
        safe = sky.compute(wait)("safe") > pool.node(1)
        lost = sky.compute(wait)("lost") > pool.node(0)
        again = sky.compute(wait)("again").with_options(retries=1) > pool.node(0)
        named = sky.compute(wait)("named") > pool.node(1)
        for name in ("safe", "lost"):
            wait_for(tmp_path / name)
        kill_head(*others, with_process=pool.agent_pids()[0])
        with pytest.raises(NodeLost, match="may have begun"):
            lost.result(_LIMIT_S)
        for future, advice in zip(calling[1:], ("set max_restarts=1", "it is restarted"), strict=True):
            with pytest.raises(ActorLost, match=f"on node 0: its node was lost; {advice}") as raised:
                future.result(_LIMIT_S)
            assert (raised.value.node, raised.value.started) == (0, None), "as without a head"
        appear(tmp_path / "go")
        assert [calling[0].result(_LIMIT_S), there.more() >> pool, back.more() >> pool] == [2, 3, 1]
        with pytest.raises(ActorLost):
            gone.more() >> pool
        assert [future.result(_LIMIT_S) for future in (safe, again, named)] == ["safe", "again", "named"]
        assert max(len((tmp_path / name).read_text()) for name in ("safe", "lost", "named")) == 1
        assert [len(ref.get()) for ref in (*kept[:2], put)] == [600_000] * 3, "node 1 has the first two"
        with pytest.raises(RefLost, match="are gone"):
            kept[2].get()
        assert sky.compute(abs)(-1) @ pool == [1, 1]
    (closed,) = [event for event in events if isinstance(event, sky.events.PoolClosed)]
    assert (closed.calls, closed.failed) == (18, 4), "no head has counted all of them"
