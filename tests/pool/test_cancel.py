"""Cancelling a queued, running, awaited or stubborn call: SIGINT, a grace period, SIGKILL. The pool goes on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import SlotLost
from tests.engines import engine_of
from tests.waiting import lines_of, until


@pytest.fixture(scope="module")
def shared(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    # A busy machine may not schedule an interrupted slot for seconds, and a killed one would note nothing.
    return sky_pools(nodes=1, concurrency=2, logs=False, cancel_grace_s=30)


@pytest.fixture
def impatient(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    """Pool that soon kills a call that goes on."""
    return sky_pools(nodes=1, concurrency=2, logs=False, cancel_grace_s=0.4)


@pytest.fixture
def pool(shared: sky.ComputePool) -> Iterator[sky.ComputePool]:
    """Pool whose slots must both work at the end of each test."""
    yield shared
    assert [f.result(timeout=60) for f in [sky.compute(abs)(-i) > shared for i in range(4)]] == [0, 1, 2, 3]


@sky.compute
def wait_for_ever(notes: Path) -> None:
    """Write the pid at the beginning, then the exception that interrupts the wait."""

    def note(text: object) -> None:
        with notes.open("a") as file:
            file.write(f"{text}\n")

    try:
        note(os.getpid())  # from here on it may be interrupted
        threading.Event().wait()
    except BaseException as error:
        note(type(error).__name__)
        raise
    finally:
        note("finally")


@sky.compute
def deaf(notes: Path) -> None:
    """Run without a chance to be interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    notes.write_text(f"{os.getpid()}\n")
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(60)


def is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def began(notes: Path) -> int:
    until(lambda: lines_of(notes))
    return int(lines_of(notes)[0])


def test_a_running_call_is_interrupted_and_notices_it(pool: sky.ComputePool, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    future = wait_for_ever(notes) > pool
    pid = began(notes)
    assert future.running()
    assert future.cancel()
    assert future.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    until(lambda: "finally" in lines_of(notes))
    assert lines_of(notes)[1:] == ["KeyboardInterrupt", "finally"]
    assert not is_gone(pid)  # the slot lives on


def test_cancelling_twice_is_one_cancel(pool: sky.ComputePool, tmp_path: Path) -> None:
    future = wait_for_ever(tmp_path / "notes") > pool
    began(tmp_path / "notes")
    assert future.cancel()
    assert future.cancel()
    until(lambda: len(lines_of(tmp_path / "notes")) == 3)


def test_a_finished_call_cannot_be_cancelled(pool: sky.ComputePool) -> None:
    future = sky.compute(abs)(-3) > pool
    assert future.result(timeout=60) == 3
    assert not future.cancel()
    assert future.result() == 3


def test_a_queued_call_never_runs(pool: sky.ComputePool, tmp_path: Path) -> None:
    running = [wait_for_ever(tmp_path / f"running{i}") > pool for i in range(2)]
    queued = [wait_for_ever(tmp_path / f"queued{i}") > pool for i in range(3)]
    for i in range(2):
        began(tmp_path / f"running{i}")
    for future in [*queued, *running]:
        assert future.cancel()
    assert sky.compute(abs)(-1) >> pool == 1
    assert not list(tmp_path.glob("queued*"))


def test_a_call_that_ignores_the_interrupt_is_killed_after_the_grace_period(
    impatient: sky.ComputePool, tmp_path: Path
) -> None:
    future = deaf(tmp_path / "pid") > impatient
    pid = began(tmp_path / "pid")
    started = time.monotonic()
    assert future.cancel()
    until(lambda: is_gone(pid))
    assert time.monotonic() - started > 0.35
    assert sky.compute(abs)(-1) >> impatient == 1


def test_processes_started_by_a_killed_call_are_killed_too(impatient: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def starts_another(notes: Path) -> None:
        import subprocess

        child = subprocess.Popen(["sleep", "1000"])
        (notes.parent / "child").write_text(f"{child.pid}\n")
        deaf.local(notes)

    future = starts_another(tmp_path / "pid") > impatient
    began(tmp_path / "pid")
    child = began(tmp_path / "child")
    future.cancel()
    until(lambda: is_gone(child))


def test_a_call_that_swallows_the_interrupt_delivers_no_value(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def swallow() -> int:
        (tmp_path / "began").touch()
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        return 5

    future = swallow() > pool
    until((tmp_path / "began").exists)
    future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(timeout=60)


def test_the_next_call_of_the_slot_is_not_interrupted(pool: sky.ComputePool) -> None:
    """The signal must not hit a call that happens to run when it arrives."""

    @sky.compute
    def spin(ms: int) -> int:
        end = time.monotonic() + ms / 1000
        while time.monotonic() < end:
            pass
        return ms

    wanted: list[tuple[int, Any]] = []
    for i in range(60):
        future = spin(i % 4) > pool
        wanted.append((i % 4, spin(i % 4) > pool))
        time.sleep(0.001 * (i % 3))
        future.cancel()
    for ms, kept in wanted:
        assert kept.result(timeout=60) == ms


def test_cancelling_the_await_stops_the_call(pool: sky.ComputePool, tmp_path: Path) -> None:
    notes = tmp_path / "notes"

    async def main() -> None:
        waiting = asyncio.create_task(pool.run_async(wait_for_ever(notes)))
        while not lines_of(notes):  # noqa: ASYNC110  # another process writes them
            await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    until(lambda: "finally" in lines_of(notes))


def test_an_await_that_takes_too_long_stops_the_call(pool: sky.ComputePool, tmp_path: Path) -> None:
    both = tmp_path / "first", tmp_path / "second"

    async def main() -> None:
        async with asyncio.timeout(None) as limit:
            asyncio.get_running_loop().create_task(time_is_up(limit))
            await pool.run_async(wait_for_ever(both[0]) & wait_for_ever(both[1]))

    async def time_is_up(limit: asyncio.Timeout) -> None:
        while not all(lines_of(notes) for notes in both):  # noqa: ASYNC110  # other processes write them
            await asyncio.sleep(0.005)
        limit.reschedule(asyncio.get_running_loop().time())

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    for notes in both:
        until(lambda notes=notes: "finally" in lines_of(notes))  # type: ignore[misc]


def test_cancelling_a_groups_future_stops_all_its_calls(pool: sky.ComputePool, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    future = (wait_for_ever(first) & wait_for_ever(second)) > pool
    began(first)
    began(second)
    assert future.cancel()
    until(lambda: "finally" in lines_of(first))
    until(lambda: "finally" in lines_of(second))


def test_a_stream_of_a_group_that_is_left_early_stops_the_others(pool: sky.ComputePool, tmp_path: Path) -> None:
    values = sky.gather(sky.compute(abs)(-1), wait_for_ever(tmp_path / "notes"), stream=True) >> pool
    assert next(values) == 1
    began(tmp_path / "notes")
    values.close()
    until(lambda: "finally" in lines_of(tmp_path / "notes"))


def test_a_blocking_library_call_is_interrupted(pool: sky.ComputePool, tmp_path: Path) -> None:
    """time.sleep, a lock and a subprocess all return on a signal in the main thread."""

    @sky.compute
    def run_child() -> None:
        import subprocess

        (tmp_path / "began").touch()
        subprocess.run(["sleep", "1000"], check=True)

    future = run_child() > pool
    until((tmp_path / "began").exists)
    future.cancel()
    assert sky.compute(abs)(-1) >> pool == 1


def test_user_code_runs_in_the_main_thread(pool: sky.ComputePool) -> None:
    def is_main() -> bool:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        return threading.current_thread() is threading.main_thread()

    assert sky.compute(is_main)() >> pool


def test_closing_with_cancel_stops_running_calls(tmp_path: Path) -> None:
    pool = sky.ComputePool(sky.Local(), logs=False).start()
    future = wait_for_ever(tmp_path / "notes") > pool
    pid = began(tmp_path / "notes")
    pool.close(cancel=True)
    assert is_gone(pid)
    assert lines_of(tmp_path / "notes")[1:] == ["KeyboardInterrupt", "finally"]
    with pytest.raises(sky.errors.PoolClosed):
        future.result(timeout=0)


def test_closing_with_cancel_does_not_wait_for_a_call_that_ignores_it(tmp_path: Path) -> None:
    pool = sky.ComputePool(sky.Local(), logs=False, cancel_grace_s=0.2).start()
    future = deaf(tmp_path / "notes") > pool
    pid = began(tmp_path / "notes")
    pool.close(cancel=True)
    assert is_gone(pid)
    with pytest.raises(sky.errors.PoolClosed):
        future.result(timeout=0)


@sky.compute
def touch(path: Path) -> None:
    path.touch()


@pytest.mark.parametrize("ending", ["close", "group"])
def test_waiting_calls_do_not_begin_in_place_of_stopped_ones(tmp_path: Path, ending: str) -> None:
    begun, late = tmp_path / "begun", tmp_path / "late"
    with sky.ComputePool(sky.Local(), nodes=1, logs=False) as pool:
        for _ in range(300):
            touch(tmp_path / "warm") >> pool  # short calls: the node is sent some in advance
        group = sky.gather(wait_for_ever(begun), *(touch(late) for _ in range(4))) > pool
        until(begun.exists)
        if ending == "close":
            pool.close(cancel=True)
        else:
            group.cancel()
            assert sky.compute(abs)(-1) >> pool == 1  # the slot is free
    assert not late.exists()


@sky.compute
def note_and_nap(notes: Path, number: int, seconds: float) -> int:
    with notes.open("a") as file:
        file.write(f"{number}\n")
    time.sleep(seconds)
    return number


def test_calls_that_wait_for_their_slot_run_once_or_not_at_all(tmp_path: Path) -> None:
    """Cancel every third of many short calls while some calls kill their process."""
    notes = tmp_path / "notes"
    with sky.ComputePool(sky.Local(), nodes=2, concurrency=2, logs=False, cancel_grace_s=0.4) as pool:
        futures = [note_and_nap(notes, i, 0.0005 * (i % 7)) > pool for i in range(300)]
        cancelled = {i for i, future in enumerate(futures) if i % 3 == 0 and future.cancel()}
        killers = [sky.compute(lambda: os._exit(3))() > pool for _ in range(2)]
        for i, future in enumerate(futures):
            if i not in cancelled:
                assert future.result(timeout=60) == i
        for killer in killers:
            with pytest.raises(SlotLost):
                killer.result(timeout=60)
    ran = [int(line) for line in lines_of(notes)]
    assert len(ran) == len(set(ran))
    assert {i for i in range(300) if i not in cancelled} <= set(ran)


def test_a_short_call_does_not_wait_for_a_long_one_while_a_slot_is_idle(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with sky.ComputePool(sky.Local(), nodes=1, concurrency=2, logs=False, cancel_grace_s=0.4) as pool:
        for _ in range(20):
            touch(tmp_path / "warm") >> pool  # calls are known to be short so far
        stopped = wait_for_ever(begun) > pool
        until(begun.exists)
        calls = [note_and_nap(tmp_path / "notes", i, 0.01) > pool for i in range(20)]
        assert [call.result(timeout=60) for call in calls] == list(range(20))
        stopped.cancel()


def test_many_waiting_calls_are_cancelled_at_once_and_signals_are_handled_meanwhile(
    sky_pools: Callable[..., sky.ComputePool], tmp_path: Path
) -> None:
    count = 20_000
    answered: list[float] = []
    with sky.ComputePool(provider=sky.Local(), nodes=1, logs=False, console=False, cancel_grace_s=0.1) as pool:
        running = wait_for_ever(tmp_path / "notes") > pool
        began(tmp_path / "notes")
        futures = [sky.compute(abs)(-i) > pool for i in range(count)]

        before = signal.signal(signal.SIGVTALRM, lambda *_: answered.append(time.thread_time()))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.002, 0.002)  # by processor time: it comes on a busy machine too
        start = time.thread_time()
        try:
            engine_of(pool).cancel_all()
        finally:
            took = time.thread_time() - start
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
    assert took < 20  # a search in the queue for each of them takes minutes
    assert len(answered) > 2
    assert isinstance(running.exception(timeout=0), sky.errors.PoolClosed)
    assert all(isinstance(future.exception(timeout=0), sky.errors.PoolClosed) for future in futures)


@sky.compute
def imports(folder: Path) -> tuple[int, int]:
    import sys

    sys.path.insert(0, str(folder))
    import slow_package  # type: ignore[import-not-found]

    return os.getpid(), slow_package.ANSWER


def test_a_cancel_lets_an_import_end_so_that_later_calls_can_use_the_package(
    sky_pools: Callable[..., sky.ComputePool], tmp_path: Path
) -> None:
    """A package whose import raises leaves its modules in sys.modules, without their names in the package."""
    package = tmp_path / "slow_package"
    package.mkdir()
    (package / "inner.py").write_text("ANSWER = 42\n")
    (package / "__init__.py").write_text(
        "import os, time\n"
        "from .inner import *\n"
        f"open({str(tmp_path / 'begun')!r}, 'w').close()\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        "ANSWER = inner.ANSWER\n"
    )
    pool = sky_pools(nodes=1, concurrency=1, logs=False, cancel_grace_s=20)
    pid = sky.compute(os.getpid)() >> pool
    future = imports(tmp_path) > pool
    until((tmp_path / "begun").exists)
    future.cancel()
    time.sleep(0.2)  # the signal comes meanwhile; if it came later, the test would prove less and pass
    (tmp_path / "go").touch()
    assert imports(tmp_path) >> pool == (pid, 42)


def test_a_call_that_was_left_to_the_io_thread_is_open_and_can_be_cancelled(
    pool: sky.ComputePool, tmp_path: Path
) -> None:
    engine = engine_of(pool)
    engine.ledger.is_behind = True  # as while many nodes send values at once
    future = wait_for_ever(tmp_path / "notes") > pool
    engine.ledger.is_behind = False
    assert not engine.wait_idle(0.0)
    assert future.cancel()
    assert engine.wait_idle(20.0)
