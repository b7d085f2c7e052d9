"""The actor on a node: it passes bytes between the driver and the node's agent."""

from __future__ import annotations

import asyncio
import socket

from ...core.process import USUAL_SLACK_S, set_timer_slack
from ...node.agent import attach
from ...wire.carried import CarriedStreams, Opened, StreamBatch


class Bridge:
    """Bridge to one agent. Ray runs its methods, all in one event loop.

    Args:
        socket_path: Path of the agent's socket.
    """

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._streams = CarriedStreams(self._open)

    async def exchange(self, batch: StreamBatch, wait_s: float) -> StreamBatch:
        """Pass a batch on to the agent, and return what the agent has sent, after at most `wait_s` seconds."""
        await self._streams.take(batch)
        return await self._streams.give(wait_s)

    async def _open(self, _: bytes) -> Opened:
        """Pass the agent one end of a socket, as the stub does with its standard input and output."""
        set_timer_slack(USUAL_SLACK_S)  # of this thread, which carries the bytes
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                stub = attach.pass_on(self._socket_path, theirs.fileno(), theirs.fileno())
            except FileNotFoundError as error:
                ours.close()
                raise ConnectionRefusedError(f"skyward: no agent at {self._socket_path}") from error
            except OSError:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours)

        def close() -> None:
            writer.close()
            stub.close()

        return Opened(reader, writer, close)
