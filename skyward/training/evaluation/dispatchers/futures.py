"""Futures of evaluations. They never become "running", so that `cancel` always works."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from ....errors import TaskExited

T = TypeVar("T")


def new_future(stop: Callable[[Future[Any]], object]) -> Future[Any]:
    """Return a future that calls `stop` with itself when it is cancelled, in the cancelling thread."""
    future: Future[Any] = Future()

    def done(ended: Future[Any]) -> None:
        if ended.cancelled():
            ended.set_running_or_notify_cancel()  # wakes threads that wait for several futures at once
            stop(ended)

    future.add_done_callback(done)
    return future


def settle(future: Future[T], value: T) -> None:
    """Set the value, unless the future was cancelled or given up."""
    try:
        future.set_result(value)
    except InvalidStateError:  # cancelled meanwhile: nobody waits for it
        return


def settle_error(future: Future[Any], error: BaseException) -> None:
    """Set the error, unless the future is done; SystemExit becomes TaskExited, so it cannot end this process."""
    if isinstance(error, SystemExit):
        error = TaskExited(
            f"the evaluation: called sys.exit({error.code!r}); end it by returning metrics or raising an error",
            code=error.code,
        )
    try:
        future.set_exception(error)
    except InvalidStateError:  # cancelled meanwhile: nobody waits for it
        return
