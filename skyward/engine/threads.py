"""Threads of the engine whose failures reach the code that must act on them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from ..core.interrupts import has_ended

_log = logging.getLogger(__name__)


def start_thread(run: Callable[[], object], *, name: str, failed: Callable[[BaseException], object]) -> None:
    """Call `run` in a new thread.

    Args:
        run: The work.
        name: Name of the thread.
        failed: Called with the error if `run` raises, in that thread. If no thread can be started, it is called in
            the current one.
    """

    def guarded() -> None:
        try:
            run()
        except BaseException as error:  # SystemExit too, which would end the thread silently
            failed(error)

    try:
        threading.Thread(target=guarded, name=name, daemon=True).start()
    except RuntimeError as error:  # this process cannot start another thread
        failed(error)


def run_side_by_side(actions: Iterable[Callable[[], object]]) -> None:
    """Call each action in its own thread, and wait for all. Without more threads, call it in the current one."""
    threads: list[threading.Thread] = []
    for action in actions:
        thread = threading.Thread(target=action, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # this process cannot start another thread
            action()
        else:
            threads.append(thread)
    for thread in threads:
        while not has_ended(thread):
            continue


def in_words(error: BaseException) -> str:
    """Describe an error by its type and message. Copes with a `__str__` of the user's that raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as another:
        return f"{type(error).__name__} (its __str__ raised {type(another).__name__})"


def report(error: BaseException) -> None:
    """Log a bug of skyward in a thread that continues."""
    _log.error("pool: error in an internal thread, which continues; please report this bug", exc_info=error)
