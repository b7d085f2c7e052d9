"""A future of skyward: the reading thread decodes its value, and its cancel stops the running work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from skyward.calls.futures import Future
from skyward.calls.undecoded import Undecoded


def test_a_value_is_decoded_once_by_its_first_reader() -> None:
    threads: list[str] = []

    def decode() -> int:
        threads.append(threading.current_thread().name)
        return 42

    future: Future[int] = Future()
    future.settle(Undecoded(decode))
    assert threads == [], "not by the thread that settles"
    assert [future.result(), future.result(), future.exception()] == [42, 42, None]
    assert threads == [threading.current_thread().name]


def test_many_threads_read_the_same_value_decoded_once() -> None:
    count = [0]

    def decode() -> object:
        count[0] += 1
        return object()

    future: Future[object] = Future()
    got: list[object] = []
    threads = [threading.Thread(target=lambda: got.append(future.result(60))) for _ in range(8)]
    for thread in threads:
        thread.start()
    future.settle(Undecoded(decode))
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len({id(value) for value in got}) == 1
    assert count == [1]


def has_condition(future: Future[int]) -> bool:
    return any(isinstance(held, threading.Condition) for held in gc.get_referents(future))


def test_a_future_has_the_standard_fields_but_makes_its_condition_for_the_first_waiter() -> None:
    done: Future[int] = Future()
    done.settle(1)
    assert done.result() == 1
    assert not has_condition(done)
    assert not [held for held in gc.get_referents(done) if isinstance(held, list)], "lists for callbacks or waiters"
    assert all(hasattr(done, name) for name in vars(concurrent.futures.Future()))

    open_one: Future[int] = Future()
    got: list[int] = []
    reader = threading.Thread(target=lambda: got.append(open_one.result()))
    reader.start()
    while not has_condition(open_one):
        reader.join(0.001)
    open_one.settle(2)
    reader.join()
    assert got == [2]


def test_an_error_that_decoding_raises_is_the_calls_error() -> None:
    def decode() -> None:
        raise LookupError("remote")

    for settle in ("settle", "settle_error"):
        future: Future[None] = Future()
        getattr(future, settle)(Undecoded(decode))
        with pytest.raises(LookupError, match="remote"):
            future.result()
        assert isinstance(future.exception(), LookupError)


def test_a_running_call_can_be_cancelled_and_its_work_is_stopped_once() -> None:
    stopped: list[int] = []
    future: Future[int] = Future(stopped.append, call_id=1)
    future.set_running()
    assert future.running()
    assert future.cancel()
    assert future.cancel()
    assert stopped == [1]
    assert future.cancelled()
    future.settle(3)
    future.settle_error(ValueError())
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()


def test_a_finished_call_cannot_be_cancelled() -> None:
    stopped: list[int] = []
    future: Future[int] = Future(stopped.append, call_id=1)
    future.settle(3)
    assert not future.cancel()
    assert stopped == []
    assert future.result() == 3


def test_a_strict_future_keeps_the_standard_meaning() -> None:
    pending: Future[int] = Future(is_strict=True)
    running: Future[int] = Future(is_strict=True)
    running.set_running()
    assert pending.cancel()
    assert not running.cancel()
    running.settle(1)
    assert running.result() == 1


def test_wait_and_as_completed_handle_values_errors_and_cancels() -> None:
    futures: list[Future[int]] = [Future() for _ in range(3)]

    def end_all() -> None:
        futures[0].settle(Undecoded(lambda: 1))
        futures[1].settle_error(ValueError())
        futures[2].cancel()

    done = threading.Thread(target=end_all)
    done.start()
    assert set(concurrent.futures.as_completed(futures, 10)) == set(futures)
    assert concurrent.futures.wait(futures, 10).not_done == set()
    done.join()


def test_a_call_is_sent_without_the_lock_of_its_waiters() -> None:
    """Engines send with their lock, which another thread may need while it has the futures' locks."""
    future: Future[int] = Future()
    with future._condition:  # private: the standard field, which `concurrent.futures.wait` holds
        sending = threading.Thread(target=future.set_running, daemon=True)
        sending.start()
        sending.join(60)
        assert future.running()
        assert not sending.is_alive()


def test_a_cancelled_call_is_not_running_however_its_sending_and_its_cancel_meet() -> None:
    for _ in range(500):
        future: Future[int] = Future()
        assert not list(concurrent.futures.wait([future], 0).done)  # so it has a condition from now on
        both = threading.Barrier(2)

        def send(future: Future[int] = future, both: threading.Barrier = both) -> None:
            both.wait(60)
            future.set_running()

        sending = threading.Thread(target=send)
        sending.start()
        both.wait(60)
        assert future.cancel()
        sending.join(60)
        assert future.cancelled()


def test_a_cancel_wakes_a_waiting_thread() -> None:
    future: Future[int] = Future()
    seen: list[BaseException] = []

    def ask() -> None:
        try:
            future.result(60)
        except concurrent.futures.CancelledError as error:
            seen.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    future.cancel()
    thread.join(60)
    assert len(seen) == 1


def test_callbacks_are_called_once_for_each_outcome() -> None:
    called: list[object] = []
    ends: list[Callable[[Future[int]], object]] = [
        lambda f: f.settle(1),
        lambda f: f.settle_error(ValueError()),
        lambda f: f.cancel(),
    ]
    for end in ends:
        future: Future[int] = Future()
        future.add_done_callback(called.append)
        end(future)
        end(future)
        assert called == [future]
        called.clear()


def test_asyncio_gets_the_decoded_value_and_error() -> None:
    def decode_error() -> None:
        raise LookupError("remote")

    async def ask() -> int:
        good: Future[int] = Future()
        bad: Future[int] = Future()
        loop = asyncio.get_running_loop()
        loop.call_soon(good.settle, Undecoded(lambda: 5))
        loop.call_soon(bad.settle_error, Undecoded(decode_error))
        with pytest.raises(LookupError, match="remote"):
            await asyncio.wrap_future(bad)
        return await asyncio.wrap_future(good)

    assert asyncio.run(ask()) == 5


def test_a_raised_error_keeps_no_future_alive() -> None:
    future: Future[int] = Future()
    future.settle_error(ValueError("x"))
    with contextlib.suppress(ValueError):
        future.result()
    gone = weakref.ref(future)
    gc.disable()
    try:
        del future
        assert gone() is None
    finally:
        gc.enable()
