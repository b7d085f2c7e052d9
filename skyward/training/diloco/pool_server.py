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
from .algorithm import DelayedNesterov, OuterOptimizer, OuterSGD
from .http_app import DiLoCoApp
from .opening import end_exchange, open_exchange
from .pool_transport import ENDED, PIECE_BYTES, refuse

_LOOK_S = 10.0
"""Longest time between two looks for silent workers, in seconds."""

_log = logging.getLogger(__name__)


class PoolServer:
    """Server whose requests come by channels. A thread has its event loop.

    Args:
        options: Options of the server; see `sky.integrations.diloco`.
        workers: Workers of the call that came first. The first round waits for them, unless an option says more.
        is_over: Called from time to time; True ends the server.

    Raises:
        UsageError: An option is not legal, or the save is of another model.
    """

    def __init__(self, options: Mapping[str, Any], workers: int, *, is_over: Callable[[], bool]) -> None:
        rest = dict(options)
        self.num_workers: int = rest.pop("num_workers") or max(workers, rest["min_workers"])
        lr, momentum = rest.pop("outer_lr"), rest.pop("outer_momentum")
        outer: OuterOptimizer = OuterSGD(lr=lr, momentum=momentum, nesterov=momentum != 0)
        if rest["async_mode"]:
            outer = DelayedNesterov(lr=lr, momentum=momentum, every=rest.pop("dn_buffer_size") or self.num_workers)
        self._exchange = open_exchange(None, self.num_workers, outer_optimizer=outer, **rest)
        # Workers of an earlier call are not here, and none of this one waits for them.
        for entry in self._exchange.status()["workers"]:
            self._exchange.evict(entry["worker"])
        self._look_s = min(_LOOK_S, options["heartbeat_timeout"] / 3 or _LOOK_S)
        self._is_over = is_over
        self._app = DiLoCoApp(self._exchange, token=None, stop=self._ask_to_stop)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._threads_of_channels = anyio.CapacityLimiter(math.inf)
        self._thread = threading.Thread(target=self._run, name="skyward-diloco-server", daemon=True)
        self._thread.start()

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

    def stop(self) -> None:
        """Save the last state, and return when nothing runs. Idempotent."""
        self._ask_to_stop()
        self._thread.join()

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
            end_exchange(self._exchange)

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
                size = int(dict(message["headers"]).get(b"content-length", b"0"))
                await self._send(channel, json.dumps({"status": message["status"], "size": size}).encode())
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
