"""joblib on a pool of 2 nodes with 2 slots each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import joblib
import numpy as np
import pytest
from joblib import Parallel, delayed
from joblib.parallel import BACKENDS, get_active_backend

import skyward as sky
from skyward.errors import ArgumentNotPicklable, NoCapacity, ResultNotPicklable, SlotLost, UsageError
from skyward.events import Emit
from skyward.integrations.joblib import SkywardBackend, joblib_backend
from skyward.integrations.pools import JoblibPool
from skyward.values.machine import Machine, Offer, PoolSpec
from skyward.wire.blobs import Blob
from skyward.wire.payloads import encode
from tests.waiting import until

pytestmark = pytest.mark.by_reference  # joblib's users have modules, and a module shows a warning once

SLOTS = 4
LONG_S = 60.0
"""Longer than any test may take: what sleeps so long must be stopped."""


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(sky.Local(), nodes=2, concurrency=2, cancel_grace_s=1.0) as opened:
        yield opened


@pytest.fixture
def on_pool(pool: sky.ComputePool) -> Iterator[sky.ComputePool]:
    with joblib_backend(pool):
        yield pool


def square(x: int) -> int:
    return x * x


def where(_: int) -> tuple[int, int]:
    info = sky.instance_info()
    assert info is not None
    time.sleep(0.02)
    return info.node, os.getpid()


def span(_: int) -> tuple[float, float]:
    start = time.monotonic()
    time.sleep(0.15)  # longer than the way of a call to its slot, on a busy machine too
    return start, time.monotonic()


def hold(started: Path, seconds: float = LONG_S) -> None:
    started.touch()
    time.sleep(seconds)


def raise_when(path: Path) -> None:
    until(path.exists)
    raise KeyError("mine")


def assert_all_slots_are_free(pool: sky.ComputePool) -> None:
    started = time.monotonic()
    with joblib_backend(pool):
        Parallel(batch_size=1)(delayed(time.sleep)(0.05) for _ in range(2 * SLOTS))
    assert time.monotonic() - started < LONG_S / 2


# Where and how many ---------------------------------------------------------------------------------------------------


def test_values_come_in_order(on_pool: sky.ComputePool) -> None:
    assert Parallel()(delayed(square)(i) for i in range(50)) == [i * i for i in range(50)]


def test_functions_without_a_name_travel_too(on_pool: sky.ComputePool) -> None:
    offset = 7
    assert Parallel()(delayed(lambda x: x + offset)(i) for i in range(5)) == [7, 8, 9, 10, 11]


def test_calls_use_every_slot_of_every_node(on_pool: sky.ComputePool) -> None:
    places = set(Parallel(batch_size=1)(delayed(where)(i) for i in range(8 * SLOTS)))
    assert {node for node, _ in places} == {0, 1}
    assert len(places) == SLOTS
    assert os.getpid() not in {pid for _, pid in places}


@pytest.mark.parametrize(
    ("asked", "given"), [(None, 4), (-1, 4), (-2, 3), (-4, 1), (-99, 1), (1, 1), (3, 3), (4, 4), (99, 4)]
)
def test_n_jobs_counts_slots(on_pool: sky.ComputePool, asked: int | None, given: int) -> None:
    assert joblib.effective_n_jobs(asked) == given


def test_n_jobs_of_zero_is_refused(on_pool: sky.ComputePool) -> None:
    with pytest.raises(ValueError, match="n_jobs == 0"):
        Parallel(n_jobs=0)(delayed(square)(i) for i in range(3))


@pytest.mark.parametrize("n_jobs", [2, -3, 99])
def test_at_most_n_jobs_calls_run_at_once(on_pool: sky.ComputePool, n_jobs: int) -> None:
    most: list[int] = []
    while len(most) < 3 and max(most, default=0) < joblib.effective_n_jobs(n_jobs):  # a busy machine may delay some
        spans = Parallel(n_jobs=n_jobs, batch_size=1)(delayed(span)(i) for i in range(16))
        edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
        most.append(int(np.cumsum([step for _, step in edges]).max()))
    assert max(most) == joblib.effective_n_jobs(n_jobs)


def test_one_job_runs_here_as_in_joblib(on_pool: sky.ComputePool) -> None:
    assert set(Parallel(n_jobs=1)(delayed(os.getpid)() for _ in range(3))) == {os.getpid()}


def test_a_pool_of_one_slot_still_runs_calls_on_its_node() -> None:
    with JoblibPool(sky.Local()) as pool:
        assert pool.total_slots == 1
        pids = set(Parallel()(delayed(os.getpid)() for _ in range(6)))
    assert len(pids) == 1
    assert os.getpid() not in pids


def test_the_number_of_jobs_may_be_set_for_the_block(pool: sky.ComputePool) -> None:
    with joblib_backend(pool, n_jobs=2) as same:
        assert same is pool
        assert joblib.effective_n_jobs(None) == 2


# Batches --------------------------------------------------------------------------------------------------------------


def test_short_calls_are_sent_in_batches(on_pool: sky.ComputePool) -> None:
    parallel = Parallel()
    assert parallel(delayed(square)(i) for i in range(3000)) == [i * i for i in range(3000)]
    assert parallel.n_dispatched_batches < 1000


def test_long_calls_are_sent_alone(on_pool: sky.ComputePool) -> None:
    parallel = Parallel()
    parallel(delayed(time.sleep)(0.25) for _ in range(3 * SLOTS))
    assert parallel.n_dispatched_batches == 3 * SLOTS


def test_a_given_batch_size_is_kept(on_pool: sky.ComputePool) -> None:
    parallel = Parallel(batch_size=10, pre_dispatch="all")
    parallel(delayed(square)(i) for i in range(400))
    assert parallel.n_dispatched_batches == 40


@pytest.mark.parametrize("pre_dispatch", ["all", "n_jobs", 1, "3*n_jobs"])
def test_pre_dispatch_changes_no_value(on_pool: sky.ComputePool, pre_dispatch: str | int) -> None:
    assert Parallel(pre_dispatch=pre_dispatch)(delayed(square)(i) for i in range(40)) == [i * i for i in range(40)]


class AfterTheBatches(int):
    """Batch size whose use waits until all batches so far have ended."""

    parallel: Any = None

    def __eq__(self, other: object) -> bool:
        if hasattr(self.parallel, "n_dispatched_tasks"):  # its call has begun
            until(lambda: self.parallel.n_completed_tasks == self.parallel.n_dispatched_tasks)
        return super().__eq__(other)

    __hash__ = int.__hash__


def test_an_input_that_fails_when_all_its_calls_have_ended_raises(on_pool: sky.ComputePool) -> None:
    def calls() -> Iterator[Any]:
        yield from (delayed(square)(i) for i in range(4))
        raise LookupError("no more")

    size = AfterTheBatches(1)
    size.parallel = Parallel(n_jobs=2, batch_size=size, pre_dispatch="all")
    with pytest.raises(LookupError, match="no more"):
        size.parallel(calls())


def test_input_is_read_as_calls_end(on_pool: sky.ComputePool, tmp_path: Path) -> None:
    read = []

    def wait() -> None:
        until((tmp_path / "go").exists)

    def numbers() -> Iterator[Any]:
        for i in range(100):
            read.append(i)
            yield delayed(wait)()

    results = Parallel(pre_dispatch=6, batch_size=1, return_as="generator")(numbers())
    assert len(read) <= 6 + SLOTS
    (tmp_path / "go").touch()
    assert len(list(results)) == 100
    assert len(read) == 100


class FarPool:
    """Pool of two slots behind a link on which a message takes 50 ms in each direction."""

    provider = sky.Local()
    total_slots = 2

    def __init__(self) -> None:
        self._slots = ThreadPoolExecutor(2)

    def submit_sharing(self, pending: Any, seen: Any) -> Future[Any]:
        def run() -> Any:
            time.sleep(0.05)
            value = pending.fn.local(*pending.args)
            time.sleep(0.05)
            return value

        return self._slots.submit(run)


def test_batches_for_a_distant_pool_are_longer() -> None:
    parallel = Parallel(backend=SkywardBackend(pool=FarPool()))
    parallel(delayed(time.sleep)(0.002) for _ in range(3000))
    # The number of batches would depend on how long a sleep of 2 ms takes on a busy machine.
    assert parallel._backend.MIN_IDEAL_BATCH_DURATION > 0.3  # on a nearby pool, 0.2


# The context ----------------------------------------------------------------------------------------------------------


def test_the_default_backend_is_back_afterwards(pool: sky.ComputePool) -> None:
    before, registered = type(get_active_backend()[0]), dict(BACKENDS)
    with contextlib.suppress(ZeroDivisionError), joblib_backend(pool):
        assert isinstance(get_active_backend()[0], SkywardBackend)
        raise ZeroDivisionError
    assert type(get_active_backend()[0]) is before
    assert registered == BACKENDS


def test_the_backend_may_be_given_to_one_parallel(pool: sky.ComputePool) -> None:
    pids = Parallel(backend=SkywardBackend(pool=pool))(delayed(os.getpid)() for _ in range(4))
    assert os.getpid() not in pids


def test_an_object_that_is_no_pool_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="pool=None: not a pool; pass the open one"), joblib_backend(None):  # type: ignore[type-var]
        pass


def test_bad_retries_are_refused_at_once(pool: sky.ComputePool) -> None:
    with pytest.raises(UsageError, match="retries"), joblib_backend(pool, retries=-1):
        pass


def test_a_closed_pool_is_refused() -> None:
    with JoblibPool(sky.Local()) as pool:
        pass
    with pytest.raises(sky.errors.PoolClosed), joblib_backend(pool):
        Parallel()(delayed(square)(i) for i in range(3))


def test_parallel_objects_in_several_threads_share_the_pool(pool: sky.ComputePool) -> None:
    values: dict[int, list[int]] = {}

    def run(factor: int) -> None:
        with joblib_backend(pool):
            values[factor] = Parallel()(delayed(square)(factor * i) for i in range(200))

    threads = [threading.Thread(target=run, args=(factor,)) for factor in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == {factor: [(factor * i) ** 2 for i in range(200)] for factor in range(4)}


def test_a_parallel_object_may_be_used_again(on_pool: sky.ComputePool) -> None:
    with Parallel() as parallel:
        assert parallel(delayed(square)(i) for i in range(9)) == [i * i for i in range(9)]
        with pytest.raises(ZeroDivisionError):
            parallel(delayed(divmod)(1, i) for i in range(9))
        assert parallel(delayed(square)(i) for i in range(9)) == [i * i for i in range(9)]


def test_no_late_callback_of_a_failed_call_sends_its_batches_in_the_next_one(on_pool: sky.ComputePool) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # two of a hundred rounds failed so, before calls waited for their callbacks
    try:
        for _ in range(100):
            with Parallel(pre_dispatch=8) as parallel:
                with pytest.raises(Refused):
                    parallel(delayed(refuse)(i) for i in range(60))
                assert parallel(delayed(square)(i) for i in range(9)) == [i * i for i in range(9)]
    finally:
        sys.setswitchinterval(interval)


def test_nothing_of_a_failed_call_is_in_the_next_one(on_pool: sky.ComputePool) -> None:
    with Parallel(pre_dispatch=8) as parallel:  # joblib itself gives values of the first call in the second one
        with pytest.raises(Refused):
            parallel(delayed(refuse)(i) for i in range(60))
        assert parallel(delayed(square)(i) for i in range(9)) == [i * i for i in range(9)]


def test_no_thread_is_left(on_pool: sky.ComputePool) -> None:
    Parallel()(delayed(square)(i) for i in range(9))
    until(lambda: not any(thread.name == "skyward-joblib" for thread in threading.enumerate()))


# Generators -----------------------------------------------------------------------------------------------------------


def test_a_generator_gives_values_in_order(on_pool: sky.ComputePool) -> None:
    results = Parallel(return_as="generator")(delayed(square)(i) for i in range(60))
    assert next(results) == 0
    assert list(results) == [i * i for i in range(1, 60)]


def test_an_unordered_generator_gives_values_as_they_come(on_pool: sky.ComputePool, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def last_first(i: int) -> int:
        if i == 0:
            until(go.exists)
        return i

    results = Parallel(return_as="generator_unordered", batch_size=1)(delayed(last_first)(i) for i in range(6))
    first = [next(results) for _ in range(5)]
    go.touch()
    assert sorted(first) == [1, 2, 3, 4, 5]
    assert list(results) == [0]


def test_a_generator_that_is_dropped_stops_its_calls(pool: sky.ComputePool, tmp_path: Path) -> None:
    with joblib_backend(pool):
        results = Parallel(return_as="generator", batch_size=1)(delayed(hold)(tmp_path / str(i)) for i in range(20))
        until(lambda: len(list(tmp_path.iterdir())) == SLOTS)
        with pytest.warns(UserWarning, match="have been cancelled"):
            del results
    assert_all_slots_are_free(pool)


def test_one_parallel_may_feed_another(on_pool: sky.ComputePool) -> None:
    first = Parallel(return_as="generator")(delayed(square)(i) for i in range(60))
    second = Parallel()(delayed(square)(x) for x in first)
    assert second == [i**4 for i in range(60)]


# Errors ---------------------------------------------------------------------------------------------------------------


class Refused(Exception):
    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason, code)
        self.code = code


def refuse(i: int) -> int:
    if i == 5:
        raise Refused("not five", 17)
    return i


def test_an_exception_arrives_unchanged(on_pool: sky.ComputePool) -> None:
    with pytest.raises(Refused, match="not five") as caught:
        Parallel()(delayed(refuse)(i) for i in range(50))
    assert caught.value.code == 17
    notes = "\n".join(caught.value.__notes__)
    assert "in refuse" in notes
    assert "node " in notes


def test_an_error_stops_the_other_calls(pool: sky.ComputePool, tmp_path: Path) -> None:
    def calls() -> Iterator[Any]:
        yield delayed(raise_when)(tmp_path / "1")
        for i in range(1, 40):
            yield delayed(hold)(tmp_path / str(i))

    with pytest.raises(KeyError, match="mine"), joblib_backend(pool):
        Parallel(batch_size=1)(calls())
    assert_all_slots_are_free(pool)
    assert len(list(tmp_path.iterdir())) < 10


def test_an_error_stops_calls_that_waited_for_their_turn(pool: sky.ComputePool, tmp_path: Path) -> None:
    def calls() -> Iterator[Any]:
        yield delayed(raise_when)(tmp_path / "1")
        for i in range(1, 40):
            yield delayed(hold)(tmp_path / str(i))

    with pytest.raises(KeyError, match="mine"), joblib_backend(pool):
        Parallel(n_jobs=2, batch_size=1)(calls())
    assert_all_slots_are_free(pool)
    assert len(list(tmp_path.iterdir())) < 4


def test_a_timeout_stops_the_calls(pool: sky.ComputePool, tmp_path: Path) -> None:
    with pytest.raises(multiprocessing.TimeoutError), joblib_backend(pool):
        Parallel(timeout=0.3)(delayed(hold)(tmp_path / str(i)) for i in range(8))
    assert_all_slots_are_free(pool)


def test_an_interrupt_stops_the_calls(pool: sky.ComputePool, tmp_path: Path) -> None:
    def interrupt() -> None:
        until(lambda: len(list(tmp_path.iterdir())) == SLOTS)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt), joblib_backend(pool):
        Parallel(batch_size=1)(delayed(hold)(tmp_path / str(i)) for i in range(20))
    thread.join()
    assert_all_slots_are_free(pool)
    assert len(list(tmp_path.iterdir())) < 20


INTERRUPTED = """
import sys, time
from pathlib import Path
from joblib import Parallel, delayed
import skyward as sky

def hold(folder, i):
    try:
        Path(folder, f"began-{i}").touch()
        time.sleep(60)
    finally:
        Path(folder, f"ended-{i}").touch()

def main():
    with sky.integrations.JoblibPool(sky.Local(), nodes=2, concurrency=2, cancel_grace_s=15):
        results = Parallel(batch_size=1, return_as=sys.argv[2])(delayed(hold)(sys.argv[1], i) for i in range(20))
        time.sleep(60)

main()
"""


@pytest.mark.parametrize("return_as", ["list", "generator"])
def test_ctrl_c_in_a_terminal_ends_the_calls_and_everything_else(tmp_path: Path, return_as: str) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "marks"
    script.write_text(INTERRUPTED)
    folder.mkdir()
    # Its own session stands for the terminal: Ctrl-C reaches the whole group.
    child = subprocess.Popen(
        [sys.executable, script, folder, return_as], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        until(lambda: len(list(folder.glob("began-*"))) == SLOTS)
        os.killpg(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=100)
    finally:
        child.kill()
    assert child.returncode == -signal.SIGINT
    assert "\nKeyboardInterrupt\n" in err
    assert len(list(folder.glob("began-*"))) == SLOTS
    assert len(list(folder.glob("ended-*"))) == SLOTS  # each had its `finally`
    until(lambda: not any(str(script) in command for command in commands()))


def commands() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            yield path.read_bytes().replace(b"\0", b" ").decode(errors="replace")


def test_an_error_of_the_input_is_raised(on_pool: sky.ComputePool) -> None:
    def calls() -> Iterator[Any]:
        for i in range(30):
            yield delayed(square)(i)
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        Parallel(batch_size=1)(calls())


@pytest.mark.parametrize("at", [0, 30])
def test_an_argument_that_cannot_travel_is_an_error_and_no_hang(on_pool: sky.ComputePool, at: int) -> None:
    with pytest.raises(ArgumentNotPicklable, match="repr"):
        Parallel(batch_size=1)(delayed(repr)(threading.Lock() if i == at else i) for i in range(40))


def test_a_value_that_cannot_travel_is_an_error(on_pool: sky.ComputePool) -> None:
    with pytest.raises(ResultNotPicklable):
        Parallel()(delayed(threading.Lock)() for _ in range(4))


def die_once(marker: Path) -> str:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return "alive"
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def test_the_death_of_a_slot_is_an_error_and_the_pool_goes_on(on_pool: sky.ComputePool, tmp_path: Path) -> None:
    with pytest.raises(SlotLost, match="die_once"):
        Parallel()(delayed(die_once)(tmp_path / "died") for _ in range(3))
    assert Parallel()(delayed(square)(i) for i in range(9)) == [i * i for i in range(9)]


def test_retries_survive_the_death_of_a_slot(pool: sky.ComputePool, tmp_path: Path) -> None:
    with joblib_backend(pool, retries=1):
        assert set(Parallel()(delayed(die_once)(tmp_path / "died") for _ in range(5))) == {"alive"}


# Nesting --------------------------------------------------------------------------------------------------------------


def inner(n_jobs: int) -> tuple[int, set[int], str]:
    parallel = Parallel(n_jobs=n_jobs)
    pids = set(parallel(delayed(os.getpid)() for _ in range(4)))
    return os.getpid(), pids, type(parallel._backend).__name__


@pytest.mark.parametrize(("n_jobs", "kind"), [(2, "ThreadsOfSlot"), (1, "SequentialBackend")])
def test_calls_within_a_call_stay_in_its_slot(on_pool: sky.ComputePool, n_jobs: int, kind: str) -> None:
    for pid, pids, backend in Parallel()(delayed(inner)(n_jobs) for _ in range(4)):
        assert pids == {pid}
        assert backend == kind


def test_all_cores_within_a_call_are_the_share_of_its_slot(on_pool: sky.ComputePool) -> None:
    (found,) = Parallel()([delayed(joblib.effective_n_jobs)(-1)])
    assert found == max(joblib.cpu_count() // 2, 1)


# Arrays ---------------------------------------------------------------------------------------------------------------


def total_after_write(x: np.ndarray[Any, Any]) -> float:
    total = float(x.sum())
    x[:] = -1.0  # nobody else sees it
    return total


@pytest.mark.parametrize("order", ["C", "F"])
def test_calls_may_write_to_a_large_array_without_effect_on_others(on_pool: sky.ComputePool, order: Any) -> None:
    x = np.ones((400, 500), order=order)
    assert set(Parallel(batch_size=1)(delayed(total_after_write)(x) for _ in range(12))) == {200_000.0}
    assert x.min() == 1.0


def test_an_array_that_changed_between_two_calls_of_parallel_is_sent_again(on_pool: sky.ComputePool) -> None:
    x = np.ones(300_000)
    with Parallel() as parallel:
        assert parallel(delayed(np.sum)(x) for _ in range(3)) == [300_000.0] * 3
        x[:] = 2.0
        assert parallel(delayed(np.sum)(x) for _ in range(3)) == [600_000.0] * 3


def test_without_memmapping_a_change_within_the_call_is_seen(on_pool: sky.ComputePool) -> None:
    x = np.zeros(300_000)

    def calls() -> Iterator[Any]:
        for i in range(6):
            x[:] = i
            yield delayed(np.max)(x)

    # joblib reads ahead, one call for each slot. So a call may find what its successors wrote, but no older values.
    seen = Parallel(max_nbytes=None, batch_size=1, pre_dispatch=1)(calls())
    assert seen[0] == 0
    assert seen[-1] == 5
    assert all(found >= i for i, found in enumerate(seen))


def test_an_array_of_a_file_travels_by_value_to_nodes_without_the_file(pool: sky.ComputePool, tmp_path: Path) -> None:
    x = np.memmap(tmp_path / "x", dtype=np.float64, mode="w+", shape=(300_000,))
    x[:] = 1.0
    with joblib_backend(Elsewhere(pool)):
        assert Parallel()(delayed(total_after_write)(x) for _ in range(6)) == [300_000.0] * 6
    assert x.min() == 1.0


class Elsewhere:
    """A pool whose nodes do not have this machine's files."""

    def __init__(self, pool: sky.ComputePool) -> None:
        self.provider = NoMachines()
        self.total_slots = pool.total_slots
        self.submit_sharing = pool.submit_sharing


def test_memory_mapped_input_is_not_copied_into_the_pickle(tmp_path: Path) -> None:
    x = np.memmap(tmp_path / "x", dtype=np.float64, mode="w+", shape=(300_000,))
    encoded = encode(x, Blob.snapshot)
    assert len(encoded.body) < 1000
    assert [blob.size for blob in encoded.blobs] == [x.nbytes]


# State of the slot and of the caller ----------------------------------------------------------------------------------


def change_filters(_: int) -> int:
    warnings.simplefilter("error")
    return len(warnings.filters)


def test_warning_filters_of_the_slot_are_restored(on_pool: sky.ComputePool) -> None:
    mine = list(warnings.filters)

    def count() -> int:
        return len(warnings.filters)

    before = set(Parallel(batch_size=1)(delayed(count)() for _ in range(3 * SLOTS)))
    Parallel(batch_size=1)(delayed(change_filters)(i) for i in range(3 * SLOTS))
    assert set(Parallel(batch_size=1)(delayed(count)() for _ in range(3 * SLOTS))) == before
    assert warnings.filters == mine


def warn(_: int) -> None:
    warnings.warn("look here", UserWarning, stacklevel=1)


def test_a_warning_is_shown_once_by_each_slot() -> None:
    lines: list[sky.LogLine] = []
    with JoblibPool(sky.Local(), logs=lines.append):
        Parallel(batch_size=1)(delayed(warn)(i) for i in range(10))
    assert len([line for line in lines if "UserWarning: look here" in line.text]) == 1


def test_progress_is_printed_on_request(on_pool: sky.ComputePool, capfd: pytest.CaptureFixture[str]) -> None:
    Parallel(verbose=1)(delayed(square)(i) for i in range(20))
    err = capfd.readouterr().err
    assert "with 4 concurrent workers" in err
    assert "Done  20 out of  20" in err


def test_slots_may_be_threads() -> None:
    with JoblibPool(sky.Local(), nodes=2, concurrency=2, executor="thread"):
        assert Parallel()(delayed(square)(i) for i in range(50)) == [i * i for i in range(50)]


# JoblibPool -----------------------------------------------------------------------------------------------------------


class NoMachines:
    """A provider that installs packages and has no machines. It keeps the requests."""

    name: ClassVar[str] = "none"
    extra: ClassVar[str] = ""
    acts_on_image: ClassVar[frozenset[str]] = frozenset({"pip", "env", "includes", "excludes", "apt"})
    shares_files: ClassVar[bool] = False
    is_rented: ClassVar[bool] = False

    def __init__(self) -> None:
        self.asked: list[PoolSpec] = []

    def offers(self, spec: PoolSpec) -> list[Offer]:
        self.asked.append(spec)
        raise NoCapacity("none: nothing")

    def plan(self, spec: PoolSpec, offer: Offer, pool: str) -> list[Any]:
        return []

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        raise NoCapacity("none: nothing")

    def terminate(self, machines: list[Machine]) -> None:
        return


def image_asked(image: sky.Image | None = None, **options: Any) -> sky.Image:
    provider = NoMachines()
    with pytest.raises(NoCapacity), JoblibPool(provider, image=image, **options):
        pass
    return provider.asked[0].image


def test_joblib_is_added_to_the_image_in_the_client_s_release() -> None:
    assert image_asked().pip == (f"joblib=={joblib.__version__}",)
    assert image_asked(joblib_version="1.4.2").pip == ("joblib==1.4.2",)


def test_no_field_of_the_image_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    image = sky.Image(pip=["joblib<9", "rich"], env={"A": "1"}, includes=["data"], excludes=["*.tmp"], apt=["git"])
    assert image_asked(image) == image  # its own pin of joblib wins


def test_a_pool_that_cannot_open_leaves_the_default_backend() -> None:
    before = type(get_active_backend()[0])
    image_asked()
    assert type(get_active_backend()[0]) is before


def test_the_options_of_a_pool_are_passed_on() -> None:
    provider = NoMachines()
    with pytest.raises(NoCapacity), JoblibPool(provider, nodes=3, concurrency=4, allocation="spot", memory_gb=8):
        pass
    spec = provider.asked[0]
    assert (spec.nodes, spec.concurrency, spec.allocation, spec.memory_gib) == (3, 4, "spot", 8)


def test_the_image_of_a_local_pool_is_left_alone_without_a_warning() -> None:
    with JoblibPool(sky.Local(), nodes=2, image=sky.Image(env={"MARK": "yes"})) as pool:
        assert isinstance(pool, sky.ComputePool)
        assert Parallel()(delayed(os.getenv)("MARK") for _ in range(4)) == ["yes"] * 4
