"""`Flight`: the exchange of one update, on a thread beside training."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .frames import ArrayFrame


class Flight:
    """An exchange that has begun.

    It ends by itself, at the latest at its deadline. Its thread is a daemon: the end of the process does not wait for
    a server.

    Args:
        exchange: Function that sends an update and returns the answer. It reads nothing that training changes.
    """

    def __init__(self, exchange: Callable[[], ArrayFrame]) -> None:
        self._exchange = exchange
        self._answer: ArrayFrame | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="skyward-diloco-flight", daemon=True)
        self._thread.start()

    def result(self) -> ArrayFrame:
        """Wait for the answer, and return it. Raises the error of the exchange."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer

    def abandon(self, wait_s: float) -> None:
        """Wait a short time for the end of an exchange whose answer nobody needs."""
        self._thread.join(wait_s)

    def _run(self) -> None:
        try:
            self._answer = self._exchange()
        except BaseException as error:
            self._error = error
