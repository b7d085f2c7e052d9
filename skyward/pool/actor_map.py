"""`map` over methods of actors: each item goes to the actor with the fewest open calls."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from ..calls.actor_handle import ActorMethod
from ..calls.futures import Future, value_of
from ..calls.pending import PendingCompute
from ..core import interrupts
from ..errors import UsageError

_OPEN = 64
"""Most open calls of an actor."""


def methods_of(function: object) -> tuple[ActorMethod[..., Any], ...]:
    """Return the methods of actors that a map got, one or a list of them; none for any other function.

    Raises:
        UsageError: A list has something else, or nothing.
    """
    if isinstance(function, ActorMethod):
        return (function,)
    if not isinstance(function, list | tuple):
        return ()
    if not function or not all(isinstance(method, ActorMethod) for method in function):
        raise UsageError("map(): a list of functions must have methods of actors; pass [m1.predict, m2.predict]")
    return tuple(function)


def map_actors(
    send: Callable[[PendingCompute[Any]], Future[Any]],
    methods: tuple[ActorMethod[..., Any], ...],
    iterables: tuple[Iterable[Any], ...],
    *,
    ordered: bool,
    return_exceptions: bool,
) -> Iterator[Any]:
    """Yield the value of a call for each item. Closing the iterator cancels the open calls.

    Args:
        send: Function that sends a call.
        methods: Methods that share the items.
        iterables: Arguments of the calls. They are read as the calls are sent.
        ordered: Whether to keep the order of the items.
        return_exceptions: Whether to yield errors of calls instead of raising them.
    """
    items = zip(*iterables, strict=False)
    counts, lock = [0] * len(methods), threading.Lock()
    open_calls: dict[Future[Any], None] = {}

    def ended(number: int, _: object) -> None:
        with lock:
            counts[number] -= 1

    def fill() -> None:
        """Send calls while actors have room."""
        while len(open_calls) < _OPEN * len(methods):
            args = next(items, None)
            if args is None:
                return
            with lock:
                number = counts.index(min(counts))
                counts[number] += 1
            future = send(methods[number](*args))
            open_calls[future] = None
            future.add_done_callback(partial(ended, number))

    try:
        fill()
        while open_calls:
            future = next(iter(open_calls)) if ordered else _first_done(open_calls)
            del open_calls[future]
            try:
                value = value_of(future)
            except Exception as error:
                if not return_exceptions:
                    raise
                value = error
            fill()
            yield value
    finally:
        for future in reversed(open_calls):
            future.cancel()


def _first_done(open_calls: dict[Future[Any], None]) -> Future[Any]:
    """Wait until one of these calls has ended, and return it."""
    first = concurrent.futures.FIRST_COMPLETED
    interrupts.wait_for(lambda slice_s: bool(concurrent.futures.wait(open_calls, slice_s, first).done))
    return next(future for future in open_calls if future.done())
