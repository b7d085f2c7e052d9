"""Values and errors that have arrived and are not decoded yet, and the lock of all futures."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from ..core import interrupts

brief = threading.RLock()
"""Lock that all futures share, held for a few bytecodes only. A lock for each of thousands of open calls would be one
more object that the garbage collector visits. Reentrant: a signal handler may use a future in the same thread."""


def _renew_in_child() -> None:
    global brief
    brief = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_in_child)  # another thread may have held it


class Undecoded:
    """Value or error as it arrived. The first `get` decodes it, then returns the value or raises the error."""

    __slots__ = ("_decode", "_lock", "_outcome", "_raises")

    def __init__(self, decode: Callable[[], Any] | None = None) -> None:
        """Make a value that `decode` decodes. A subclass may override the method instead."""
        self._decode = decode
        self._raises: bool | None = None
        """Whether it turned out to be an error; None: it is not decoded yet."""
        self._outcome: Any = None
        self._lock: threading.Lock | None = None

    def decode(self) -> Any:
        """Decode the value. Raises the error that it stands for."""
        assert self._decode is not None
        return self._decode()

    def forget(self) -> None:
        """Drop the encoded form."""
        self._decode = None

    def get(self) -> Any:
        if self._raises is None:
            with brief:
                lock = self._lock = self._lock or threading.Lock()
            with lock:
                if self._raises is None:
                    self._decode_now()
        if self._raises:
            raise self._outcome
        return self._outcome

    def _decode_now(self) -> None:
        try:
            self._outcome, raises = self.decode(), False
        except BaseException as error:
            if interrupts.is_from_handler(error):
                raise  # a signal handler's error, not the call's: the next reader decodes again
            self._outcome, raises = error, True
        self._raises = raises  # last, because readers look at it without the lock
        self._lock = None
        self.forget()


def raise_error(error: BaseException) -> NoReturn:
    """Raise an error: what an Undecoded decodes that stands for one which is here already."""
    raise error
