"""Objects that live on nodes: their calls in order, their end, and what happens when their process or node is lost."""

from __future__ import annotations

import concurrent.futures
import gc
import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import skyward as sky
from skyward.errors import ActorLost, NotRun, PoolClosed, UsageError, WrongArguments
from skyward.testing import Faults
from tests.waiting import lines_of, until

LIMIT_S = 60.0


@sky.actor
class Tally:
    """Counts, and writes down what happens to it."""

    def __init__(self, diary: Path | None = None, count: int = 0) -> None:
        self.diary = diary
        self.count = count
        self.note(f"made {os.getpid()}")

    def note(self, text: str) -> None:
        if self.diary is not None:
            with self.diary.open("a") as file:
                print(text, file=file)

    def __enter__(self) -> Any:
        self.note("entered")
        return self

    def __exit__(self, *_: object) -> None:
        self.note("left")

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def append(self, number: int) -> list[int]:
        self.numbers_seen = [*getattr(self, "numbers_seen", []), number]
        return self.numbers_seen

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def pid(self) -> int:
        return os.getpid()

    def where(self) -> int:
        info = sky.instance_info()
        assert info is not None
        return info.node

    def numbers(self, limit: int) -> Iterator[int]:
        for number in range(limit):
            self.count += 1
            yield number + self.count

    def wait(self, began: Path, until_there: Path) -> int:
        began.touch()
        until(until_there.exists, LIMIT_S)
        return self.count

    def double(self, array: Any) -> Any:
        return array * 2

    def fail(self) -> None:
        raise KeyError("of the user")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


Tallies: Any = Tally
"""The class as its decorator made it, which mypy does not see."""


@sky.actor
class Counter:
    """Uses its own name, which the decorator gives another value."""

    STEP = 2
    made = 0
    unset = None

    def __init__(self, number: int = 0) -> None:
        self.number = number
        Counter.made += 1

    @property
    def doubled(self) -> int:
        return 2 * self.number

    def step(self) -> int:
        self.number += Counter.STEP
        return self.number

    def facts(self) -> tuple[bool, bool, int]:
        return isinstance(self, Counter), issubclass(type(self), Counter), Counter.made


@sky.actor
class Better(Counter):
    """Subclass of an actor class."""

    def __init__(self, number: int, more: int) -> None:
        super().__init__(number)
        self.more = more

    def step(self) -> int:
        return super().step() + self.more


@sky.actor
class Older(Counter):
    """Subclass that names its base."""

    def __init__(self, number: int, more: int) -> None:
        Counter.__init__(self, number)
        self.more = more

    def step(self) -> int:
        return Counter.step(self) + self.more


class Model(sky.ActorBase):
    """Typed actor."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    @sky.compute
    def predict(self, x: float) -> float:
        return self.weight * x

    @sky.compute(timeout_s=LIMIT_S)
    def total(self, xs: list[float]) -> float:
        return sum(self.predict.local(x) for x in xs)


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(provider=sky.Local(lease_s=30), nodes=2, logs=False, cancel_grace_s=30) as pool:
        yield pool


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Calls --------------------------------------------------------------------------------------------------------------


def test_calls_run_in_order_and_the_object_stays(pool: sky.ComputePool) -> None:
    tally: Any = Tallies() >> pool
    futures = [tally.add(1) > pool for _ in range(300)]
    assert [future.result(LIMIT_S) for future in futures] == list(range(1, 301))
    assert tally.add(1) >> pool == 301
    assert (tally.add(1) & tally.add(1)) >> pool == (302, 303)


def test_an_actor_takes_no_slot(pool: sky.ComputePool, tmp_path: Path) -> None:
    tally: Any = Tallies() >> pool
    busy = [sky.compute(wait_for)(tmp_path / f"began-{node}", tmp_path / "go") > pool.node(node) for node in range(2)]
    try:
        until(lambda: all((tmp_path / f"began-{node}").exists() for node in range(2)), LIMIT_S)
        assert tally.add(1) >> pool == 1
    finally:
        (tmp_path / "go").touch()
    concurrent.futures.wait(busy, LIMIT_S)


def wait_for(began: Path, there: Path) -> None:
    began.touch()
    until(there.exists, LIMIT_S)


def test_values_travel_as_in_calls_of_functions(pool: sky.ComputePool) -> None:
    tally: Any = Tallies() >> pool
    array = np.arange(300_000.0)
    assert (tally.double(array) >> pool)[-1] == 599_998
    assert (tally.double(pool.put(array)) >> pool)[1] == 2
    assert tally.add(tally.add(1)) >> pool == 2
    kept = tally.double(array).keep() >> pool
    assert kept.get()[2] == 4
    assert list(tally.numbers(3) >> pool) == [3, 5, 7]
    with pytest.raises(KeyError, match="of the user"):
        tally.fail() >> pool
    assert tally.add(0) >> pool == 5


def test_typed_methods_have_options_and_run_in_place_inside(pool: sky.ComputePool) -> None:
    model = Model(2.0) >> pool
    assert model.predict(3.0) >> pool == 6.0
    assert model.total([1.0, 2.0]) >> pool == 6.0
    assert model.total.options.timeout_s == LIMIT_S
    assert Model.local(2.0).predict.local(4.0) == 8.0


def test_several_calls_run_at_once_with_concurrency(pool: sky.ComputePool, tmp_path: Path) -> None:
    tally: Any = Tallies.with_options(concurrency=2)() >> pool
    waiting = tally.wait(tmp_path / "began", tmp_path / "go") > pool
    try:
        assert tally.add(1) >> pool == 1
    finally:
        (tmp_path / "go").touch()
    assert waiting.result(LIMIT_S) == 1


def test_a_cancelled_call_leaves_the_others(pool: sky.ComputePool, tmp_path: Path) -> None:
    tally: Any = Tallies() >> pool
    running = tally.wait(tmp_path / "began", tmp_path / "never") > pool
    queued = [tally.add(10**n) > pool for n in range(3)]
    until((tmp_path / "began").exists, LIMIT_S)
    assert queued[1].cancel()
    assert running.cancel()
    assert queued[2].result(LIMIT_S) == 101


def test_cancelled_calls_never_run_and_the_others_keep_their_order(pool: sky.ComputePool, tmp_path: Path) -> None:
    tally: Any = Tallies() >> pool
    running = tally.wait(tmp_path / "began", tmp_path / "go") > pool
    queued = {n: tally.append(n) > pool for n in range(120)}  # in the client, on the node and in the process's socket
    until((tmp_path / "began").exists, LIMIT_S)
    cancelled = {n for n in queued if n % 3 == 0 or 30 < n < 50}
    assert all(queued[n].cancel() for n in cancelled)
    late = tally.append(1000) > pool
    (tmp_path / "go").touch()
    assert running.result(LIMIT_S) == 0
    assert late.result(LIMIT_S) == [*(n for n in queued if n not in cancelled), 1000]


def test_lone_calls_and_bursts_take_turns_in_order(pool: sky.ComputePool) -> None:
    tally: Any = Tallies() >> pool
    counts = []
    for _ in range(30):
        counts.append(tally.add(1) >> pool)
        futures = [tally.add(1) > pool for _ in range(5)]
        counts += [future.result(LIMIT_S) for future in futures]
        futures = [tally.add(1) > pool for _ in range(3)]
        last = tally.add(1) >> pool
        counts += [*(future.result(LIMIT_S) for future in futures), last]
    assert counts == list(range(1, 301))


def test_an_actor_that_books_processors_limits_the_threads_of_libraries(pool: sky.ComputePool) -> None:
    with Tallies.with_options(cpus=1)() >> pool as tally:
        assert tally.variable("OMP_NUM_THREADS") >> pool == "1"


def test_an_actor_goes_where_it_is_sent(pool: sky.ComputePool) -> None:
    chosen: Any = Tallies() >> pool.node(1)
    assert chosen.where() >> pool == 1
    assert "on node 1, alive" in repr(chosen)
    assert " actors=" in repr(pool)
    assert "Tally on node 1" in pool._repr_html_()


# Ends ---------------------------------------------------------------------------------------------------------------


def test_hooks_run_and_the_process_ends_after_its_calls(pool: sky.ComputePool, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    with Tallies(diary) >> pool as tally:
        pid = tally.pid() >> pool
        futures = [tally.add(1) > pool for _ in range(50)]
    assert futures[-1].result(LIMIT_S) == 50
    assert lines_of(diary) == [f"made {pid}", "entered", "left"]
    until(lambda: not is_running(pid))
    with pytest.raises(ActorLost, match="'Tally': was closed") as caught:
        tally.add(1) >> pool
    assert caught.value.reason == "it was closed"
    tally.close()  # once more has no effect


def test_it_ends_with_its_last_handle(pool: sky.ComputePool, tmp_path: Path) -> None:
    tally: Any = Tallies(tmp_path / "diary") >> pool
    pid = tally.pid() >> pool
    future = tally.add(3) > pool
    del tally
    gc.collect()
    assert future.result(LIMIT_S) == 3
    until(lambda: not is_running(pid))
    assert lines_of(tmp_path / "diary")[-1] == "left"


def test_it_ends_with_the_pool(tmp_path: Path) -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2, logs=False) as pool:
        tally: Any = Tallies(tmp_path / "diary") >> pool
        other: Any = Tallies() >> pool
        assert [one.where() >> pool for one in (tally, other)] == [0, 1]  # they spread over the nodes
        assert not pool._life.running()[0].members.is_idle  # it keeps its node
        pid = tally.pid() >> pool
    assert lines_of(tmp_path / "diary")[-1] == "left"
    assert not is_running(pid)
    with pytest.raises(PoolClosed):
        tally.add(1) >> pool


def test_a_constructor_that_raises_is_the_error_of_the_creation(pool: sky.ComputePool) -> None:
    with pytest.raises(TypeError, match="Path"):
        sky.actor(Path)(3) >> pool  # type: ignore[arg-type]
    assert (Tallies(count=4) > pool).result(LIMIT_S).add(0) >> pool == 4


# Losses -------------------------------------------------------------------------------------------------------------


def test_calls_of_a_dead_actor_fail(pool: sky.ComputePool) -> None:
    tally: Any = Tallies() >> pool
    futures = [tally.die() > pool, tally.add(1) > pool]
    for future in futures:
        with pytest.raises(ActorLost, match="'Tally' on node .: its process was killed by signal 9.*max_restarts=1"):
            future.result(LIMIT_S)
    with pytest.raises(ActorLost):
        tally.add(1) >> pool
    assert repr(tally) == "<actor Tally, gone>"


def test_a_restarted_actor_begins_at_its_constructor_and_goes_on(pool: sky.ComputePool, tmp_path: Path) -> None:
    tally: Any = Tallies.with_options(max_restarts=1)(tmp_path / "diary", 5) >> pool
    futures = [tally.add(1) > pool, tally.die() > pool, *(tally.add(1) > pool for _ in range(100))]
    assert futures[0].result(LIMIT_S) == 6
    with pytest.raises(ActorLost, match="it is restarted"):
        futures[1].result(LIMIT_S)
    assert [future.result(LIMIT_S) for future in futures[2:]] == list(range(6, 106))
    assert sum(line.startswith("made") for line in lines_of(tmp_path / "diary")) == 2
    with pytest.raises(ActorLost, match="raise max_restarts=1, or make another"):
        tally.die() >> pool


def test_a_lone_call_on_the_line_of_a_killed_process_fails(pool: sky.ComputePool, tmp_path: Path) -> None:
    tally: Any = Tallies.with_options(max_restarts=1)() >> pool
    pid = tally.pid() >> pool

    def kill() -> None:
        until((tmp_path / "began").exists, LIMIT_S)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ActorLost) as caught:
        tally.wait(tmp_path / "began", tmp_path / "never") >> pool
    killer.join()
    assert caught.value.started
    assert tally.pid() >> pool != pid


@pytest.mark.parametrize("kill", ["agent", "node"])
def test_an_actor_of_a_lost_node_restarts(kill: str) -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2, logs=False, console=False) as pool:
        faults = Faults(pool)
        lost: Any = Tallies() >> pool.node(0)
        tally: Any = Tallies.with_options(max_restarts=3, memory_gib=0.1)() >> pool.node(0)
        anywhere: Any = Tallies.with_options(max_restarts=3, name="x")() >> pool
        pids = [one.pid() >> pool for one in (lost, tally)]
        node = 0
        if kill == "agent":
            os.kill(faults.agent(node), signal.SIGKILL)
        else:
            faults.kill_node(node)
        until(lambda: not any(map(is_running, pids)))
        with pytest.raises(ActorLost, match="its node was lost|its process"):
            while True:
                lost.add(1) >> pool
        assert again(tally, pool) == 0
        assert again(anywhere, pool) in (0, 1)


def again(tally: Any, pool: sky.ComputePool) -> int:
    """Return the node of an actor, and ask once more while the loss of its node has not been noticed."""
    while True:
        try:
            node: int = tally.where() >> pool
        except ActorLost:
            continue
        return node


# Maps ----------------------------------------------------------------------------------------------------------------


def test_a_map_runs_on_one_actor_or_is_shared_by_several(pool: sky.ComputePool) -> None:
    models = [Model(2.0) >> pool for _ in range(3)]
    doubled = [2.0 * x for x in range(500)]
    assert pool.map(models[0].predict, range(500)) == doubled
    assert pool.map([model.predict for model in models], range(500)) == doubled
    assert sorted(pool.map([model.predict for model in models], range(500), ordered=False)) == doubled
    endless = pool.imap(models[0].predict, itertools.count())
    assert list(itertools.islice(endless, 100)) == doubled[:100]
    tally: Any = Tallies() >> pool
    errors = pool.map(tally.add, [1, "text", 2], return_exceptions=True)
    assert [type(value) for value in errors] == [int, TypeError, int]
    with pytest.raises(TypeError):
        pool.map(tally.add, ["text", 1])
    with pytest.raises(UsageError, match="chunk=3: calls of an actor are sent one by one"):
        pool.map(tally.add, [1], chunk=3)
    with pytest.raises(UsageError, match="must have methods of actors"):
        pool.map(cast(Any, [tally.add, print]), [1])


# Names --------------------------------------------------------------------------------------------------------------


def test_an_actor_is_found_by_its_name_until_it_is_closed(pool: sky.ComputePool) -> None:
    Tallies.with_options(name="shared")(None, 7) >> pool
    gc.collect()
    assert pool.actor("shared").add(1) >> pool == 8
    with pytest.raises(UsageError, match="name='shared': an actor of this pool has this name"):
        Tallies.with_options(name="shared")() >> pool
    with pytest.raises(UsageError, match="use one of 'shared'"):
        pool.actor("shard")
    pool.actor("shared").close()
    with pytest.raises(UsageError, match="no actor"):
        pool.actor("shared")


# Classes that name themselves, and subclasses ------------------------------------------------------------------------


def as_in_a_script() -> dict[str, Any]:
    """Return Counter and its subclasses as a script defines them. They travel by value."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    source = "".join(inspect.getsource(cls.cls) for cls in cast(Any, (Counter, Better, Older)))
    exec(f"import skyward as sky\n{source}", namespace)
    return namespace


@pytest.mark.parametrize("classes", [globals(), as_in_a_script()], ids=["by name", "by value"])
def test_a_class_that_names_itself_and_its_subclasses_work(pool: sky.ComputePool, classes: dict[str, Any]) -> None:
    counter = classes["Counter"]() >> pool
    assert [counter.step() >> pool for _ in range(2)] == [2, 4]
    assert counter.facts() >> pool == (True, True, 1)
    for name in ("Better", "Older"):
        derived = classes[name](10, more=100) >> pool
        assert (derived.step() >> pool, derived.facts() >> pool) == (112, (True, True, 1))


def test_names_of_an_actor_class_are_those_of_the_class() -> None:
    cls: Any = sky.actor(type("Plain", (), {"STEP": 2, "name": "of the user"}))
    assert (cls.STEP, cls.name, cls.__name__) == (2, "of the user", "Plain")
    cls.STEP += 1
    assert (cls.local().STEP, cls.cls.STEP) == (3, 3)
    assert isinstance(cls.local(), cls)
    assert not isinstance(3, cls)
    with pytest.raises(AttributeError, match="'ActorClass' object has no attribute 'missing'"):
        cls.missing  # noqa: B018


def test_attributes_of_an_object_are_refused_with_advice(pool: sky.ComputePool) -> None:
    counter: Any = cast(Any, Counter)() >> pool
    for name, kind in (("doubled", "a property"), ("STEP", "an attribute"), ("unset", "an attribute")):
        advice = rf"Counter.{name}: is {kind}, .*add a method that uses it, such as `def get_{name}\(self\)"
        with pytest.raises(AttributeError, match=advice):
            getattr(counter, name)
    with pytest.raises(AttributeError, match="'Counter' has no method 'steps'; did you mean step"):
        counter.steps  # noqa: B018


# Mistakes -----------------------------------------------------------------------------------------------------------


def test_wrong_uses_are_refused_where_they_are_written(pool: sky.ComputePool) -> None:
    tally: Any = Tallies() >> pool
    with pytest.raises(UsageError, match=r"max_restart: not an option of an actor; did you mean max_restarts="):
        Tallies.with_options(max_restart=2)
    with pytest.raises(UsageError, match="max_restarts=-1: must be a whole number >= 0"):
        Tallies.with_options(max_restarts=-1)
    with pytest.raises(UsageError, match=r"num_gpus: not an option of an actor; write gpus=1"):
        Tallies.with_options(num_gpus=2)
    with pytest.raises(UsageError, match="gpus=1.5: must be 0, a share below 1, or a whole number"):
        Tallies.with_options(gpus=1.5)
    with pytest.raises(WrongArguments, match="Tally"):
        Tallies(number=1)
    with pytest.raises(WrongArguments, match=r"add\(number\)"):
        tally.add()
    with pytest.raises(AttributeError, match="add"):
        tally.ad(1)
    with pytest.raises(UsageError, match="retries=2: 'add' is a method of an actor and runs at most once"):
        tally.add.with_options(retries=2)(1) >> pool
    with pytest.raises(UsageError, match="one object on one node"):
        tally.add(1) @ pool
    with pytest.raises(UsageError, match="one object"):
        Tallies() @ pool
    with pytest.raises(NotRun):
        Tallies().add(1)
    with pytest.raises(UsageError, match="not a class"):
        sky.actor(3)  # type: ignore[call-overload]
    with sky.ComputePool(provider=sky.Local(), logs=False) as other, pytest.raises(UsageError, match="another pool"):
        tally.add(1) >> other


def test_a_method_of_a_plain_class_warns_once() -> None:
    class Plain:
        @sky.compute
        def step(self) -> int:
            return 1

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        Plain().step()
        Plain().step()
    (warning,) = warned
    assert "Plain.step: @sky.compute on a method sends a copy" in str(warning.message)


class Scorer(sky.ActorBase):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    @sky.batched(max_size=4, wait_s=30)
    def score(self, xs: list[int]) -> list[int]:
        self.sizes.append(len(xs))
        return [2 * x for x in xs]

    def seen(self) -> list[int]:
        return self.sizes


def test_calls_of_a_batched_method_are_gathered(pool: sky.ComputePool) -> None:
    scorer: Any = Scorer.with_options(concurrency=8)() >> pool
    with scorer:
        futures = [scorer.score(x) > pool for x in range(8)]
        assert [future.result(LIMIT_S) for future in futures] == [2 * x for x in range(8)]
        assert pool.map(scorer.score, range(4)) == [0, 2, 4, 6]
        assert scorer.seen() >> pool == [4, 4, 4]


# Killed clients -----------------------------------------------------------------------------------------------------

CLIENT = """
import sys, time
import skyward as sky

@sky.actor
class Sleeper:
    def pid(self):
        import os
        return os.getpid()
    def sleep(self):
        time.sleep(600)

with sky.ComputePool(provider=sky.Local(), logs=False, console=False) as pool:
    sleeper = Sleeper.with_options(memory_gib=0.1)() >> pool
    print(sleeper.pid() >> pool, *pool.agent_pids().values(), flush=True)
    calls = [sleeper.sleep() > pool for _ in range(200)]
    print("sent", flush=True)
    calls[0].result()
"""


def test_a_killed_client_leaves_no_process_of_an_actor_with_waiting_calls() -> None:
    client = subprocess.Popen([sys.executable, "-c", CLIENT], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    with client, client.stdout:
        pids = [int(pid) for pid in client.stdout.readline().split()]
        assert client.stdout.readline() == "sent\n"
        client.kill()
    until(lambda: not any(map(is_running, pids)), LIMIT_S)
