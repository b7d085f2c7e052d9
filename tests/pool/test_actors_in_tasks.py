"""Handles of actors in tasks: calls in order, errors, losses and cancellation, and the life of what a task holds."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.errors import ActorLost, UsageError
from skyward.testing import Faults
from tests.waiting import until

LIMIT_S = 60.0


class Tally(sky.ActorBase):
    """Counts, and may know another one."""

    def __init__(self, count: int = 0, other: Tally | None = None) -> None:
        self.count = count
        self.other = other
        self.seen: list[int] = []

    @sky.compute
    def add(self, number: int) -> int:
        self.count += number
        return self.count

    @sky.compute
    def note(self, number: int, data: Any = None) -> list[int]:
        self.seen.append(number if data is None else number + int(data.sum()))
        return self.seen

    @sky.compute
    def numbers(self) -> Iterator[int]:
        yield self.count

    @sky.compute
    def ask_other(self, number: int, pool: sky.ComputePool) -> int:
        assert self.other is not None
        return self.other.add(number) >> pool

    @sky.compute
    def ask(self, other: Tally, number: int, pool: sky.ComputePool) -> int:
        return other.add(number) >> pool

    @sky.compute
    def run(self, function: Any, pool: sky.ComputePool) -> Any:
        return sky.compute(function)() >> pool

    @sky.compute
    def wait(self, began: Path, there: Path) -> None:
        began.touch()
        until(there.exists, LIMIT_S)

    @sky.compute
    def ask_when_all_do(self, other: Tally, folder: Path, count: int, pool: sky.ComputePool) -> str:
        """Call another one once `count` calls of this method run. Returns the text of the error, or the answer."""
        (folder / f"runs-{os.getpid()}").touch()
        until(lambda: len(list(folder.glob("runs-*"))) == count, LIMIT_S)
        try:
            return str(other.add(1) >> pool)
        except UsageError as error:
            (folder / "refused").touch()
            return str(error)

    @sky.compute
    def fail(self) -> None:
        raise KeyError("of the user")

    @sky.compute
    def pid(self) -> int:
        return os.getpid()

    @sky.compute
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=2, concurrency=1, logs=False, cancel_grace_s=30)


@pytest.fixture
def tally(pool: sky.ComputePool) -> Iterator[Tally]:
    made = Tally() >> pool
    yield made
    made.close()


@pytest.fixture
def no_others(pool: sky.ComputePool) -> None:
    """Wait for the end of actors that other tests have dropped."""
    gc.collect()
    until(lambda: count_actors(pool) == 0, LIMIT_S)


def count_actors(pool: sky.ComputePool) -> int:
    return len(pool._life.running()[0].actors.work())  # no public name counts what an actor has to do


@sky.compute
def add(tally: Tally, number: int, pool: sky.ComputePool) -> int:
    return tally.add(number) >> pool


# Calls --------------------------------------------------------------------------------------------------------------


def test_a_task_calls_an_actor_that_it_gets_captures_or_finds(pool: sky.ComputePool) -> None:
    with Tally.with_options(name="found")() >> pool as tally:
        assert add(tally, 1, pool) >> pool.node(0) == 1
        assert sky.compute(lambda: tally.add(1) >> pool)() >> pool.node(1) == 2
        assert sky.compute(lambda: pool.actor("found").add(1) >> pool)() >> pool == 3
        assert sky.compute(lambda method: method(1) >> pool)(tally.add) >> pool == 4
        assert sky.compute(lambda: (tally.add(1) & tally.add(1)) >> pool)() >> pool == (5, 6)
        assert sorted(pool.map(lambda _: tally.add(1) >> pool, range(20))) == list(range(7, 27))
        assert tally.add(0) >> pool == 26


def test_calls_of_a_task_run_in_order_even_behind_arrays(pool: sky.ComputePool, tally: Tally) -> None:
    def send() -> list[int]:
        block = np.zeros(100_000)
        return [tally.note(n, None if n % 3 else block) > pool for n in range(60)][-1].result(LIMIT_S)

    assert sky.compute(send)() >> pool.node(1) == list(range(60))


def test_a_task_joins_calls_of_an_actor_and_keeps_their_values(pool: sky.ComputePool, tally: Tally) -> None:
    @sky.compute
    def parent() -> tuple[int, int, list[int]]:
        joined = tally.add(tally.add(1)) >> pool
        kept = tally.note(7).keep() >> pool
        return joined, sky.compute(len)(kept) >> pool, kept.get()

    assert parent() >> pool.node(1) == (2, 1, [7])


def test_actors_call_each_other_and_the_pool(pool: sky.ComputePool, tally: Tally) -> None:
    first = Tally(0, tally) >> pool
    assert first.ask_other(3, pool) >> pool == 3
    assert tally.ask(first, 4, pool) >> pool == 4
    assert first.run(lambda: 5, pool) >> pool == 5


def test_a_handle_that_comes_back_is_the_one_that_was_sent(pool: sky.ComputePool, tally: Tally) -> None:
    assert sky.compute(lambda: [tally])() >> pool == [tally]
    assert "<actor Tally, of pool" in (sky.compute(lambda: repr(tally))() >> pool)


# The life of what a task holds --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_others")
def test_an_actor_lives_as_long_as_a_task_that_holds_it(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def later(tally: Tally) -> int:
        (tmp_path / "began").touch()
        until((tmp_path / "go").exists, LIMIT_S)
        return tally.add(1) >> pool

    future = later(Tally(5) >> pool) > pool
    until((tmp_path / "began").exists, LIMIT_S)
    gc.collect()
    assert count_actors(pool) == 1
    (tmp_path / "go").touch()
    assert future.result(LIMIT_S) == 6
    until(lambda: count_actors(pool) == 0, LIMIT_S)


@pytest.mark.usefixtures("no_others")
def test_an_actor_lives_as_long_as_one_whose_constructor_got_it(pool: sky.ComputePool) -> None:
    outer = Tally(0, Tally(5) >> pool) >> pool
    gc.collect()
    assert outer.ask_other(1, pool) >> pool == 6
    assert count_actors(pool) == 2
    outer.close()
    until(lambda: count_actors(pool) == 0, LIMIT_S)


@pytest.mark.usefixtures("no_others")
def test_a_handle_without_an_actor_says_so(pool: sky.ComputePool) -> None:
    kept = Tally(0) >> pool
    holder: Any = sky.actor(list)() >> pool
    holder.append(kept) >> pool
    del kept
    gc.collect()
    until(lambda: count_actors(pool) == 1, LIMIT_S)
    with pytest.raises(ActorLost, match="keep a handle, or give the actor a name"):
        (holder.pop() >> pool).add(1) >> pool


# Failures -----------------------------------------------------------------------------------------------------------


def test_an_error_of_the_method_arrives_in_the_task(pool: sky.ComputePool, tally: Tally) -> None:
    @sky.compute
    def parent() -> str:
        try:
            tally.fail() >> pool
        except KeyError as error:
            return str(error)
        return ""

    assert parent() >> pool == "'of the user'"
    with pytest.raises(KeyError, match="of the user"):
        sky.compute(lambda: tally.fail() >> pool)() >> pool


def test_the_death_of_an_actor_fails_the_calls_of_a_task(pool: sky.ComputePool) -> None:
    tally = Tally.with_options(max_restarts=1)(7) >> pool

    @sky.compute
    def parent() -> tuple[list[str], int]:
        lost = []
        futures: list[Any] = [tally.die() > pool, tally.add(1) > pool]
        for future in futures:
            try:
                lost.append(str(future.result(LIMIT_S)))
            except ActorLost as error:
                lost.append("killed" if "signal 9" in error.reason else error.reason)
        return lost, tally.add(1) >> pool

    assert parent() >> pool == (["killed", "8"], 9)
    with pytest.raises(ActorLost, match="raise max_restarts=1, or make another"):
        sky.compute(lambda: tally.die() >> pool)() >> pool


def test_a_cancelled_task_stops_its_calls_and_no_others(pool: sky.ComputePool, tmp_path: Path, tally: Tally) -> None:
    @sky.compute
    def parent() -> None:
        futures: list[Any] = [tally.wait(tmp_path / "began", tmp_path / "never") > pool, tally.add(100) > pool]
        futures[0].result()

    future = parent() > pool
    until((tmp_path / "began").exists, LIMIT_S)
    own = tally.add(1) > pool
    assert future.cancel()
    assert own.result(LIMIT_S) == 1


def test_a_task_that_dies_takes_its_calls_along(pool: sky.ComputePool, tmp_path: Path, tally: Tally) -> None:
    @sky.compute
    def parent() -> None:
        future = tally.wait(tmp_path / "began", tmp_path / "never") > pool
        assert not future.done()
        until((tmp_path / "began").exists, LIMIT_S)
        os._exit(1)

    with pytest.raises(sky.errors.SlotLost):
        parent() >> pool
    assert tally.add(1) >> pool == 1


@pytest.mark.parametrize("lost", ["of the actor", "of the task"])
def test_a_lost_node_ends_what_was_on_it(lost: str, tmp_path: Path) -> None:
    with sky.ComputePool(sky.Local(), nodes=2, logs=False, console=False) as pool:
        tally = Tally(3) >> pool.node(0)

        @sky.compute
        def parent() -> str:
            try:
                tally.wait(tmp_path / "began", tmp_path / "never") >> pool
            except ActorLost as error:
                return error.reason
            return ""

        future = parent() > pool.node(1)
        until((tmp_path / "began").exists, LIMIT_S)
        Faults(pool).kill_node(0 if lost == "of the actor" else 1)
        if lost == "of the actor":
            assert future.result(LIMIT_S) == "its node was lost"
        else:
            with pytest.raises(sky.errors.NodeLost):
                future.result(LIMIT_S)
            assert tally.add(1) >> pool == 4


# Mistakes -----------------------------------------------------------------------------------------------------------


def test_calls_that_could_never_run_are_refused(pool: sky.ComputePool, tally: Tally) -> None:
    with pytest.raises(UsageError, match="a call of 'Tally' waits for it and the actor runs 1 at once"):
        tally.ask(tally, 1, pool) >> pool
    with pytest.raises(UsageError, match="set concurrency=2"):
        tally.run(lambda: tally.add(1) >> pool, pool) >> pool
    wide = Tally.with_options(concurrency=2)() >> pool
    assert wide.ask(wide, 1, pool) >> pool == 1
    node: Any = pool.node(0)
    # The task holds the only slot of its node while the actor waits for a call that needs that slot.
    with pytest.raises(UsageError, match="could never run, because all its possible slots"):
        sky.compute(lambda: tally.run(lambda: 1, node) >> pool)() >> node


@pytest.mark.parametrize("count", [2, 3])
def test_actors_that_call_each_other_at_the_same_moment_are_told(
    pool: sky.ComputePool, tmp_path: Path, count: int
) -> None:
    actors: list[Tally] = [Tally.with_options(name=f"no. {n}")(10 * n) >> pool for n in range(count)]
    calls = [
        actor.ask_when_all_do(actors[(n + 1) % count], tmp_path, count, pool) > pool for n, actor in enumerate(actors)
    ]
    answers = [call.result(LIMIT_S) for call in calls]
    (refused,) = [answer for answer in answers if not answer.isdigit()]
    closer = answers.index(refused)
    ring = [f"'no. {(closer + 1 + n) % count}'" for n in range(count)]
    chain = ", which waits for ".join([*ring[1:], ring[0]])
    assert refused.startswith(f"'add': could never run, because {ring[0]} waits for {chain}; let one of them answer")
    assert [actor.add(1) >> pool for actor in actors] == [
        10 * n + 1 + (n != (closer + 1) % count) for n in range(count)
    ]
    for actor in actors:
        actor.close()


def test_actors_with_room_may_call_each_other_at_the_same_moment(pool: sky.ComputePool, tmp_path: Path) -> None:
    one, other = Tally() >> pool, Tally.with_options(concurrency=2)() >> pool
    calls = [one.ask_when_all_do(other, tmp_path, 2, pool) > pool, other.ask_when_all_do(one, tmp_path, 2, pool) > pool]
    assert [call.result(LIMIT_S) for call in calls] == ["1", "1"]


def test_wrong_uses_in_a_task_are_refused(pool: sky.ComputePool, tally: Tally) -> None:
    def refused(use: Callable[[], object]) -> str:
        with pytest.raises(UsageError) as caught:
            sky.compute(use)() >> pool
        return str(caught.value)

    assert "a method of one object" in refused(lambda: tally.add(1) @ pool)
    assert "close it in the program" in refused(tally.close)
    assert "runs at most once" in refused(lambda: tally.add.with_options(retries=1)(1) >> pool)
    assert "generator function" in refused(lambda: tally.numbers() >> pool)
    assert "actors are made by the program" in refused(lambda: Tally() >> pool)
    assert "name='nobody': no actor" in refused(lambda: pool.actor("nobody"))
    with pytest.raises(UsageError, match="pass the handle itself as an argument"):
        pool.put([tally])
    assert "pass the handle itself as an argument" in refused(lambda: pool.put([tally]))
    with sky.ComputePool(sky.Local(), logs=False, console=False) as other:
        foreign = Tally() >> other
        assert "lives in another pool" in refused(lambda: foreign.add(1) >> pool)
