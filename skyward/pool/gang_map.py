"""`pool.map` of calls that run on several nodes each: one gang for each item."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ..calls.futures import Future
from ..calls.pending import PendingCompute

_AHEAD = 64
"""Gangs that wait or run at once. Each takes several nodes, so more would only wait."""


def map_gangs(
    calls: Iterator[PendingCompute[Any]],
    send: Callable[[PendingCompute[Any]], Future[Any]],
    *,
    ordered: bool,
    return_exceptions: bool,
) -> Iterator[Any]:
    """Yield the values of calls. Closing the iterator, or an error, cancels the open ones.

    Args:
        calls: The calls; read as values are consumed.
        send: Function that sends a call.
        ordered: Yield in the order of the calls. False: those that have ended first.
        return_exceptions: Yield the exception of a failed call in the place of its value.
    """
    sent: deque[Future[Any]] = deque()
    try:
        while True:
            while len(sent) < _AHEAD and (call := next(calls, None)) is not None:
                sent.append(send(call))
            if not sent:
                return
            at = 0 if ordered else next((i for i, future in enumerate(sent) if future.done()), 0)
            future = sent[at]
            try:
                value = future.result()
            except Exception as error:
                if not return_exceptions:
                    raise
                value = error
            del sent[at]
            yield value
    finally:
        for future in reversed(sent):
            future.cancel()
