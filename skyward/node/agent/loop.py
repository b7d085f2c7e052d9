"""Event loop of the agent: one thread, callbacks for descriptors and for points in time."""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections.abc import Callable
from typing import Any

_READ, _WRITE = select.POLLIN, select.POLLOUT  # the same numbers as EPOLLIN and EPOLLOUT


class Timer:
    """Pending callback; `cancel` is idempotent."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class EventLoop:
    """Runs callbacks until `stop`. An exception in one ends the loop, because an agent with a bug must not limp on."""

    def __init__(self) -> None:
        # Not `selectors`, whose look-ups cost as much as the rest of the loop. `poll` is for macOS.
        self._has_epoll = hasattr(select, "epoll")
        self._poll: Any = select.epoll() if self._has_epoll else select.poll()
        self._callbacks: dict[int, tuple[Callable[[], object], Callable[[], object] | None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._at_end: dict[Callable[[], object], None] = {}
        """Callbacks for the end of this turn, in order."""
        self.pause_s: Callable[[], float] = lambda: 0.0
        """Function that returns how long to pause before the next turn, so that it has more to do at once."""
        self._is_stopped = False

    def watch(self, file: Any, read: Callable[[], object], write: Callable[[], object] | None = None) -> None:
        """Call `read` when `file` is readable and `write`, if given, when it is writable."""
        fd = file if isinstance(file, int) else file.fileno()
        events = _READ | (_WRITE if write else 0)
        if fd in self._callbacks:
            self._poll.modify(fd, events)
        else:
            self._poll.register(fd, events)
        self._callbacks[fd] = (read, write)

    def forget(self, file: Any) -> None:
        """Stop watching `file`. Call it before closing: the number of a closed descriptor is soon reused."""
        fd = file if isinstance(file, int) else file.fileno()
        if self._callbacks.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), timer))
        return timer

    def at_end_of_turn(self, callback: Callable[[], object]) -> None:
        """Call `callback` once when all that is ready now was handled, however often it is passed here."""
        self._at_end[callback] = None

    def stop(self) -> None:
        self._is_stopped = True

    def run(self) -> None:
        callbacks = self._callbacks
        while not self._is_stopped:
            if pause_s := self.pause_s():
                time.sleep(pause_s)
            for fd, events in self._poll.poll(self._timeout()):
                # An earlier callback of this round may have forgotten this descriptor.
                read, write = callbacks.get(fd, (None, None))
                if write is not None and events & _WRITE:
                    write()
                if read is not None and events & ~_WRITE and fd in callbacks:
                    read()
            self.end_turn()

    def end_turn(self) -> None:
        """Call what waits for the end of this turn. `run` does so by itself."""
        while self._at_end:
            at_end, self._at_end = self._at_end, {}
            for callback in at_end:
                callback()

    def _timeout(self) -> float | None:
        if not self._timers:
            return None
        wait_s = self._run_timers()
        self.end_turn()
        return wait_s if wait_s is None or self._has_epoll else wait_s * 1000

    def _run_timers(self) -> float | None:
        """Run due timers and return the seconds until the next one, or None without timers."""
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
