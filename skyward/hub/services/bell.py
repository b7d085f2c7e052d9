"""Bell: wakes coroutines of a server when a thread has committed something that they wait for."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Bell:
    """Counter of changes that coroutines of one event loop wait for. Any thread may ring it.

    Attributes:
        count: All changes.
        decisive: Those after which the scheduler may decide otherwise.
    """

    def __init__(self) -> None:
        self.count = self.decisive = 0
        self.is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[asyncio.Event, bool] = {}

    def ring(self) -> None:
        """Wake all who wait."""
        self._ring(is_decisive=True)

    def ring_quietly(self) -> None:
        """Wake those who wait, except the scheduler: its decisions read the whole queue, and nothing is to decide."""
        self._ring(is_decisive=False)

    def _ring(self, *, is_decisive: bool) -> None:
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended with its server
                loop.call_soon_threadsafe(self._wake, is_decisive)

    def close(self) -> None:
        """Wake those who wait for good, so that a server can stop. Call it on the event loop."""
        self.is_closed = True
        self._wake(is_decisive=True)

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Wait until `count` is no longer `seen`, or for `timeout_s`."""
        await self._wait(self.count != seen, timeout_s, for_decisive=False)

    async def wait_to_decide(self, seen: int, timeout_s: float) -> None:
        """Wait until `decisive` is no longer `seen`, or for `timeout_s`."""
        await self._wait(self.decisive != seen, timeout_s, for_decisive=True)

    async def _wait(self, is_over: bool, timeout_s: float, *, for_decisive: bool) -> None:
        self._loop = asyncio.get_running_loop()
        if is_over or self.is_closed:
            return
        event = asyncio.Event()
        self._waiting[event] = for_decisive
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), timeout_s)
        finally:
            del self._waiting[event]

    def _wake(self, is_decisive: bool) -> None:
        self.count += 1
        self.decisive += is_decisive
        for event, for_decisive in self._waiting.items():
            if is_decisive or not for_decisive:
                event.set()
