"""A pool as a standard `concurrent.futures.Executor`, for code that was written for one."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from .cluster.future import Future
from .calls import ComputeFunction, compute

if TYPE_CHECKING:
    from .pool import ComputePool

__all__ = ["PoolExecutor"]

T = TypeVar("T")


class PoolExecutor(concurrent.futures.Executor):
    """Submits plain functions to a pool. Futures keep the standard meaning: a running call cannot be cancelled.

    `shutdown` ends the executor and not the pool. Usable in a `with` block of its own. Thread-safe.
    """

    def __init__(self, pool: ComputePool) -> None:
        self._pool = pool
        self._futures: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._is_shut_down = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Raises RuntimeError after `shutdown`."""
        function = fn if isinstance(fn, ComputeFunction) else compute(fn)
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            future: Future[T] = self._pool._submit_strict(function(*args, **kwargs))
            self._futures.add(future)
        future.add_done_callback(self._done)
        return future

    def _done(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._futures.discard(future)  # type: ignore[arg-type]

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """As the standard one: all input is read now, results come in order. A `chunksize` > 1 sends that many calls at once."""
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
            concurrent.futures.wait(futures)


def _call_each(fn: Callable[..., T], items: list[tuple[Any, ...]]) -> list[T]:
    return [fn(*item) for item in items]


def _chained(results: Iterator[list[T]]) -> Iterator[T]:
    for chunk in results:
        yield from chunk
