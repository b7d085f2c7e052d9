"""How a caller waits for futures of calls: whatever ends the wait early stops what it waited for."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

from ..core import interrupts
from .futures import Failures, Future, Undecoded, refuse_to_wait

__all__ = ["joined", "streamed", "value_of", "values_of"]

T = TypeVar("T")


def value_of(future: Future[T]) -> T:
    """Wait for the value; whatever interrupts the wait (Ctrl-C) stops the call."""
    try:
        return future.result()
    finally:
        if not future.done():
            future.cancel()
        del future


def values_of(futures: list[Future[T]]) -> list[T]:
    """All values in order; the first error, by time, stops the others and is raised."""
    refuse_to_wait("waiting for several calls")
    try:
        interrupts.wait_for(partial(_have_ended, futures))
        for future in futures:
            if future.done() and not future.cancelled():
                error = future.exception()
                if error is not None:
                    raise error
        return [future.result() for future in futures]
    finally:
        _stop(futures)
        del futures


def _have_ended(futures: list[Future[T]], timeout_s: float | None) -> bool:
    """Whether all have, or one has failed."""
    done, left = concurrent.futures.wait(futures, timeout_s, return_when=concurrent.futures.FIRST_EXCEPTION)
    return not left or any(future.cancelled() or future.has_failed for future in futures if future in done)


def streamed(futures: list[Future[T]], *, ordered: bool) -> Iterator[T]:
    """Values as they come; leaving early, or an error, stops the others."""
    try:
        for future in futures if ordered else concurrent.futures.as_completed(futures):
            yield future.result()
    finally:
        _stop(futures)


def _stop(futures: list[Future[T]]) -> None:
    """Cancel what is open, the newest first: none that waits begins in the place of one that was stopped."""
    for future in reversed(futures):
        if not future.done():
            future.cancel()


def joined(futures: list[Future[Any]], failures: Failures | None = None) -> Future[tuple[Any, ...]]:
    """A future of all values; the first error, or cancelling it, stops the others.

    `failures`: where it is counted if it fails.
    """

    def stop(_: int = 0) -> None:
        _stop(futures)

    all_of_them: Future[tuple[Any, ...]] = Future(stop, failures=failures)
    left = len(futures)
    lock = threading.Lock()

    def one_done(future: concurrent.futures.Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if future.cancelled():
            all_of_them.cancel()
        elif isinstance(future, Future) and future.has_failed:
            all_of_them.settle_error(Undecoded(future.result))
            stop()
        elif is_last:  # unpickled by whoever asks
            all_of_them.settle(Undecoded(lambda: tuple(f.result() for f in futures)))

    if not futures:
        all_of_them.settle(())
    for future in futures:
        future.add_done_callback(one_done)
    return all_of_them
