"""Waiting for a batch of joblib's until it has ended, instead of looking for it all the time.

joblib's `Parallel` looks every 10 ms whether the batch whose values come next is there, and that costs more than all
else that the client does for a batch of 0.3 s: a process that wakes up where every core is busy finds nothing of its
own in the caches. It looks by calling `get_status` of what it gave the backend as the batch's callback. So that is
made to wait; joblib itself does not change, and where it looks in another way it does so every 10 ms as ever.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from typing import Any

from joblib.parallel import TASK_PENDING

__all__ = ["BatchWait"]

_LOOK_S = 0.25
"""Seconds after which joblib looks again all the same."""
_TIMEOUT_SHARE = 0.1
"""Of a `timeout` of joblib's: the most that it may be late."""


class BatchWait:
    """Of one `Parallel` object: who reads its values sleeps until the batch that comes next has ended."""

    def __init__(self) -> None:
        self._news = threading.Event()
        self._awaited: Any = None

    def watch(self, tracker: Any) -> None:
        """`tracker`: what joblib gave as the callback of a batch."""
        if hasattr(tracker, "get_status") and hasattr(tracker, "status"):
            # Weakly: a batch and its values must not live until the garbage collector comes.
            tracker.get_status = functools.partial(self._status, weakref.ref(tracker))

    def ended(self, tracker: Any) -> None:
        """Its callback has run."""
        awaited = self._awaited
        if awaited is not None and (awaited is tracker or awaited.status != TASK_PENDING or _aborts(awaited)):
            self._news.set()

    def _status(self, named: weakref.ref[Any], timeout: float | None = None) -> Any:
        tracker = named()
        assert tracker is not None, "who asks it holds it"
        look = type(tracker).get_status
        look_s = _LOOK_S if timeout is None else min(_LOOK_S, _TIMEOUT_SHARE * timeout)
        deadline = time.monotonic() + look_s
        try:
            self._awaited = tracker
            while True:
                self._news.clear()
                status = look(tracker, timeout=timeout)
                left_s = deadline - time.monotonic()
                if status != TASK_PENDING or _aborts(tracker) or left_s <= 0:
                    return status
                self._news.wait(left_s)
        finally:
            self._awaited = None


def _aborts(tracker: Any) -> bool:
    return bool(getattr(tracker.parallel, "_aborting", False))
