"""A pool as a standard `concurrent.futures.Executor`, for code that was written for one."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ..calls.compute import PendingCompute, as_compute
from ..calls.futures import Future
from ..core import interrupts

__all__ = ["PoolExecutor"]

T = TypeVar("T")


class PoolExecutor(concurrent.futures.Executor):
    """Submits plain functions to a pool, or to some of its nodes. Futures keep the standard meaning: a running call
    cannot be cancelled.

    `shutdown` ends the executor and not the pool. Usable in a `with` block of its own. Thread-safe. As with the
    standard ones, a program that ends without `shutdown` waits for what it has submitted.

    Args:
        send: sends a call; its future must keep the standard meaning.
    """

    def __init__(self, send: Callable[[PendingCompute[Any]], Future[Any]]) -> None:
        self._send = send
        self._futures: set[Future[Any]] = set()
        self._lock = threading.RLock()
        self._is_shut_down = False
        _open.add(self)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Raises RuntimeError after `shutdown`."""
        function = as_compute(fn)
        # As with the standard ones, wrong arguments are the future's error.
        pending: PendingCompute[T] = PendingCompute(function, args, kwargs, function.options)
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            future: Future[T] = self._send(pending)
            self._futures.add(future)
        future.add_done_callback(self._done)
        return future

    def _done(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._futures.discard(future)

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """As the standard one: all input is read now, results come in order. `chunksize` calls are sent together."""
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        items = list(zip(*iterables, strict=False))
        chunks = [items[i : i + chunksize] for i in range(0, len(items), chunksize)]
        results = super().map(_call_each, [fn] * len(chunks), chunks, timeout=timeout)
        return _chained(results)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._is_shut_down = True
            futures = list(self._futures)
        if cancel_futures:
            for future in futures:
                future.cancel()
        if wait:
            interrupts.wait_for(lambda slice_s: not concurrent.futures.wait(futures, slice_s).not_done)


def _call_each(fn: Callable[..., T], items: list[tuple[Any, ...]]) -> list[T]:
    return [fn(*item) for item in items]


def _chained(results: Iterator[list[T]]) -> Iterator[T]:
    for chunk in results:
        yield from chunk


_open: weakref.WeakSet[PoolExecutor] = weakref.WeakSet()


def _shut_down_at_exit() -> None:
    for executor in list(_open):
        executor.shutdown()


atexit.register(_shut_down_at_exit)
os.register_at_fork(after_in_child=_open.clear)  # the calls are the parent's to wait for
