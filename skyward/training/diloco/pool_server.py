"""Server in a pool's program: the application of the HTTP server, whose requests come by the channels of tasks."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, wait
from typing import Any

import anyio
import anyio.to_thread
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import Message

from ...wire.task_channel import TaskChannel
from .http_app import DiLoCoApp
from .opening import end_exchange, open_exchange
from .pool_transport import ENDED, PIECE_BYTES, refuse
from .server_settings import DiLoCoSettings

_LOOK_S = 10.0
"""Longest time between two looks for silent workers, in seconds."""

_log = logging.getLogger(__name__)


class PoolServer:
    """Server whose requests come by channels. A thread has its event loop, and writes the last state.

    Args:
        settings: Settings of the server, with its number of workers.
        is_over: Called from time to time; True ends the server.
        ended: Called once nothing of it runs, by its thread, with the error of the last save, or None.

    Raises:
        UsageError: The save is of another model.
    """

    def __init__(
        self, settings: DiLoCoSettings, *, is_over: Callable[[], bool], ended: Callable[[Exception | None], None]
    ) -> None:
        self._exchange = open_exchange(settings)
        # Workers of an earlier call are not here, and none of this one waits for them.
        for entry in self._exchange.status()["workers"]:
            self._exchange.evict(entry["worker"])
        self._look_s = min(_LOOK_S, settings.heartbeat_timeout / 3 or _LOOK_S)
        self._is_over, self._tell_ended = is_over, ended
        self._app = DiLoCoApp(self._exchange, tokens=None, stop=self._ask_to_stop)
        self._loop = asyncio.new_event_loop()
        self._stopping, self._has_ended = asyncio.Event(), threading.Event()
        self._threads_of_channels = anyio.CapacityLimiter(math.inf)
        self._thread = threading.Thread(target=self._run, name="skyward-diloco-server", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """True once the last state is written, or could not be, and nothing runs."""
        return self._has_ended.is_set()

    def answer(self, channel: TaskChannel, head: Mapping[str, Any]) -> None:
        """Answer one request, and return once the answer is sent."""
        answering = self._answer(channel, head)
        try:
            future = asyncio.run_coroutine_threadsafe(answering, self._loop)
            while not wait([future], _LOOK_S).done:
                if not self._thread.is_alive():
                    future.cancel()
            future.result()
        except (CancelledError, RuntimeError):  # a loop that has ended takes no request
            answering.close()
            refuse(channel, 503, ENDED)

    def evict(self, worker: str) -> None:
        """Remove a worker whose process is gone. One that has left changes nothing."""
        self._exchange.evict(worker)

    def stop(self, timeout_s: float) -> bool:
        """Save the last state, and end all requests. Idempotent.

        Args:
            timeout_s: Longest wait, in seconds. A disk may stall, and its writer cannot be interrupted.

        Returns:
            Whether it has ended. If not, its thread ends once the disk goes on, and then calls `ended`.
        """
        self._ask_to_stop()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _ask_to_stop(self) -> None:
        self._app.end_waits()
        try:
            self._loop.call_soon_threadsafe(self._stopping.set)
        except RuntimeError:  # it has ended
            return

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._until_stopped())
        except Exception:
            _log.exception("the server ended")
        finally:
            self._app.close()
            failure = None
            try:
                failure = end_exchange(self._exchange)
            finally:
                self._has_ended.set()
                self._tell_ended(failure)

    async def _until_stopped(self) -> None:
        while not self._stopping.is_set():
            try:
                await asyncio.wait_for(self._stopping.wait(), self._look_s)
            except TimeoutError:
                await self._look()

    async def _look(self) -> None:
        try:
            await run_in_threadpool(self._exchange.evict_silent)
        except Exception:
            _log.exception("a round could not be closed")
        if self._is_over():
            self._stopping.set()

    async def _answer(self, channel: TaskChannel, head: Mapping[str, Any]) -> None:
        left, size = head["size"], 0

        async def receive() -> Message:
            nonlocal left
            try:
                piece = b"" if left == 0 else await self._in_thread(channel.receive)
            except EOFError:
                return {"type": "http.disconnect"}
            left -= len(piece)
            return {"type": "http.request", "body": piece, "more_body": left > 0}

        async def send(message: Message) -> None:
            nonlocal size
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                size, tag = int(headers.get(b"content-length", b"0")), headers.get(b"etag", b"").strip(b'"').decode()
                await self._send(channel, json.dumps({"status": message["status"], "size": size, "tag": tag}).encode())
                return
            body = memoryview(message.get("body", b""))
            for at in range(0, body.nbytes if size else 0, PIECE_BYTES):
                await self._send(channel, bytes(body[at : at + PIECE_BYTES]))

        try:
            await self._app.asgi(_scope(head), receive, send)
        except (ClientDisconnect, OSError):  # nobody reads the answer
            return

    async def _send(self, channel: TaskChannel, message: bytes) -> None:
        await self._in_thread(lambda: channel.send(message))

    async def _in_thread(self, act: Callable[[], Any]) -> Any:
        """Wait for a channel in a thread. There are as many as channels, so a slow worker holds up no other."""
        return await anyio.to_thread.run_sync(act, abandon_on_cancel=True, limiter=self._threads_of_channels)


def _scope(head: Mapping[str, Any]) -> dict[str, Any]:
    path, _, query = head["target"].partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": head["method"],
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [],
        "client": None,
        "server": None,
    }
