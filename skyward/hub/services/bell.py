"""Bell: wakes coroutines of a server when a thread has committed something that they wait for."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Bell:
    """Counter of changes that coroutines of one event loop wait for. `ring` may be called by any thread."""

    def __init__(self) -> None:
        self.count = 0
        self.is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[asyncio.Event] = set()

    def ring(self) -> None:
        """Wake those who wait."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended with its server
                loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """Wake those who wait for good, so that a server can stop. Call it on the event loop."""
        self.is_closed = True
        self._wake()

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Wait until `count` is no longer `seen`, or for `timeout_s`."""
        self._loop = asyncio.get_running_loop()
        if self.count != seen or self.is_closed:
            return
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), timeout_s)
        finally:
            self._waiting.discard(event)

    def _wake(self) -> None:
        self.count += 1
        for event in self._waiting:
            event.set()
