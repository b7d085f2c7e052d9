"""Threads that the engine starts: whatever goes wrong in one is told to whoever must act on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

__all__ = ["in_words", "report", "run_side_by_side", "start_thread"]

_log = logging.getLogger(__name__)


def start_thread(run: Callable[[], object], *, name: str, failed: Callable[[BaseException], object]) -> None:
    """Call `run` in a thread of its own. If it raises, or no thread can be had, `failed` is called with the error.

    `failed` runs in that thread, or, where there is none, in this one.
    """

    def guarded() -> None:
        try:
            run()
        except BaseException as error:  # SystemExit ends a thread silently
            failed(error)

    try:
        threading.Thread(target=guarded, name=name, daemon=True).start()
    except RuntimeError as error:  # no more threads
        failed(error)


def run_side_by_side(actions: Iterable[Callable[[], object]]) -> None:
    """Call each in a thread of its own, and wait for all. Where there are no more threads, one after another."""
    threads: list[threading.Thread] = []
    for action in actions:
        thread = threading.Thread(target=action, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads
            action()
        else:
            threads.append(thread)
    for thread in threads:
        thread.join()


def in_words(error: BaseException) -> str:
    """Type and message of an error, in one line where it has one. Its `__str__` may be the user's, and raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as another:
        return f"{type(error).__name__} (its __str__ raised {type(another).__name__})"


def report(error: BaseException) -> None:
    """Log a bug of ours in a thread that goes on."""
    _log.error("an error in a thread of the pool, which goes on; please report this", exc_info=error)
