"""Streams to an actor, which calls of its method `exchange` carry in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from .carried import NOTHING, CarriedStreams, Ended, StreamBatch

_CALLS: Final = 4
"""Calls to an actor at a time that bring it bytes."""
_LISTENING: Final = 2
"""Calls to an actor at a time that wait for bytes of it."""
_LISTEN_S: Final = 15.0
"""Longest time for which an actor waits for bytes. Each such call costs both processes almost a millisecond."""
_QUIET_S: Final = 1.0
_ANSWER_S: Final = 0.05
"""Longest time for which the first call after `_QUIET_S` waits for an answer. Idle links ask only whether the other
side is there, and two calls for that would cost twice as much.
"""
_CALL_S: Final = 20.0
"""Longest time for an actor to answer beyond what it was told to wait."""


class ActorStreams:
    """Streams to one actor, in one event loop. An actor that does not answer is lost, and its streams are over.

    Args:
        call: Calls the actor's `exchange` with a batch and the seconds to wait, and returns its batch.
        on_lost: Gets this exchange and the error of a call. It is called once, and not after `close`.
    """

    def __init__(
        self, call: Callable[[StreamBatch, float], Awaitable[Any]], on_lost: Callable[[ActorStreams, Exception], object]
    ) -> None:
        self._call, self._on_lost = call, on_lost
        self._streams = CarriedStreams()
        self._jobs: set[asyncio.Task[None]] = set()
        self._count = 0
        self._is_over = False
        self._do(self._send())
        for _ in range(_LISTENING):
            self._do(self._listen())

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, **options: Any) -> Ended:
        """Carry a stream until it has ended; `options` are those of `CarriedStreams.carry`."""
        if self._is_over:
            return Ended(None, "the bridge is lost")
        self._count += 1
        return await self._streams.carry(self._count, reader, writer, **options)

    async def check(self, limit_s: float) -> None:
        """Wait until the actor answers. One that does not answer in this time is lost."""
        if not self._is_over:
            await self._exchange(NOTHING, 0.0, limit_s=limit_s)

    def close(self, said: str) -> None:
        """Break all streams, without a word to the actor. Idempotent."""
        self._is_over = True
        self._streams.close(said)

    def _do(self, job: Any) -> None:
        task = asyncio.ensure_future(job)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def _send(self) -> None:
        loop, sent_at = asyncio.get_running_loop(), 0.0
        free = asyncio.Semaphore(_CALLS)
        while not self._is_over:
            await free.acquire()
            while not (batch := await self._streams.give(_LISTEN_S)).number:
                if self._is_over:
                    return
            wait_s = _ANSWER_S if loop.time() - sent_at > _QUIET_S else 0.0
            sent_at = loop.time()
            self._do(self._exchange(batch, wait_s, free))

    async def _listen(self) -> None:
        while not self._is_over:
            await self._exchange(NOTHING, _LISTEN_S)

    async def _exchange(
        self, batch: StreamBatch, wait_s: float, free: asyncio.Semaphore | None = None, limit_s: float = _CALL_S
    ) -> None:
        try:
            answer = await asyncio.wait_for(self._call(batch, wait_s), wait_s + limit_s)
        except Exception as error:  # by Ray, whose errors this file does not know
            if not self._is_over:
                self._is_over = True
                self._on_lost(self, error)
            return
        finally:
            if free:
                free.release()
        await self._streams.take(StreamBatch(*answer))
