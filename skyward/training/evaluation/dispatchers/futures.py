"""Futures of evaluations. They are never "running", so that `cancel` always ends the wait for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from ....errors import TaskExited

__all__ = ["new_future", "settle", "settle_error"]

T = TypeVar("T")


def new_future(stop: Callable[[Future[Any]], object]) -> Future[Any]:
    """A future that calls `stop` with itself when it is cancelled, in the thread that cancels it."""
    future: Future[Any] = Future()

    def done(ended: Future[Any]) -> None:
        if ended.cancelled():
            ended.set_running_or_notify_cancel()  # tells those who wait for several futures at once
            stop(ended)

    future.add_done_callback(done)
    return future


def settle(future: Future[T], value: T) -> None:
    """Set the value, unless it was cancelled or given up."""
    try:
        future.set_result(value)
    except InvalidStateError:  # nobody waits for it now
        return


def settle_error(future: Future[Any], error: BaseException) -> None:
    """As `settle`. An evaluation that wants this process to end does not end it."""
    if isinstance(error, SystemExit):
        error = TaskExited(f"the evaluation called sys.exit({error.code!r})", code=error.code)
    try:
        future.set_exception(error)
    except InvalidStateError:  # nobody waits for it now
        return
