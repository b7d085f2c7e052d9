"""The agent's event loop: one thread, callbacks for descriptors and for points in time."""

from __future__ import annotations

import heapq
import itertools
import selectors
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Loop", "Timer"]


class Timer:
    """A callback to come; `cancel` is idempotent."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    """Runs callbacks until `stop`. A callback's exception ends the loop: an agent with a bug must not limp on."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._is_stopped = False

    def watch(self, file: Any, read: Callable[[], None], write: Callable[[], None] | None = None) -> None:
        """Call `read` when `file` can be read, and `write`, if given, when it can be written."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        key = self._selector.get_map().get(file) if self._selector.get_map() else None
        if key is None:
            self._selector.register(file, events, (read, write))
        else:
            self._selector.modify(file, events, (read, write))

    def forget(self, file: Any) -> None:
        if self._selector.get_map().get(file) is not None:
            self._selector.unregister(file)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), timer))
        return timer

    def stop(self) -> None:
        self._is_stopped = True

    def run(self) -> None:
        while not self._is_stopped:
            for key, mask in self._selector.select(self._run_timers()):
                # An earlier callback of this round may have forgotten this one's file.
                if self._selector.get_map().get(key.fileobj) is not key:
                    continue
                read, write = key.data
                if write is not None and mask & selectors.EVENT_WRITE:
                    write()
                if mask & selectors.EVENT_READ:
                    read()

    def _run_timers(self) -> float | None:
        """Run what is due; seconds until the next one, None if there is none."""
        while self._timers:
            when, _, timer = self._timers[0]
            if timer.callback is None:
                heapq.heappop(self._timers)
                continue
            wait = when - time.monotonic()
            if wait > 0:
                return wait
            heapq.heappop(self._timers)
            timer.callback()
        return None
