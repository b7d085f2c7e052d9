"""The driver beside the head: it takes connections of the head, and carries each to the bridge of a node.

The process reads its order from standard input, one line of JSON, and prints one line when it listens. It ends with its
standard input. The head connects to its socket and sends one line of JSON:

    {"prepare": "...", "node": "..."}    makes the bridge to an agent; the answer is {"ready": true}, or {"why": "..."}
                                         with {"is_lacking": true} if Ray has no such node, or starts no process there
    {"id": "...", "agent": "..."}    from then on the connection leads to that agent, if its bridge is ready
    {"ended": "..."}    asks how the connection with this id ended; the answer is a line of JSON, {} if it has not

An agent is named by the path of its socket. `node` is Ray's node there, which was started with a resource of that name.

Every wait on Ray has a limit here: a driver without the right certificate waits for minutes, and raises nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import OrderedDict
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...core.process import USUAL_SLACK_S, set_timer_slack
from ...wire.carried import NO_AGENT, NOTHING, Ended
from ...wire.exchange import ActorStreams
from .bridge import Bridge
from .settings import SLACK_S

_CALL_S: Final = 20.0
"""Longest time for Ray to list its nodes."""
_BEGIN_S: Final = 30.0
"""Longest time for a bridge to start: Ray starts a process for it, which takes 1 to 7 s."""
_CHECK_S: Final = 4.0
"""Longest time for a bridge to answer before a link goes by it. It is short: there is another way, and leases go on."""
_REMEMBERED: Final = 1000
"""Ends of connections that are known."""


class _Agent:
    """The bridge to one agent, and the streams that it carries. A lost bridge is followed by a new one."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._exchange: ActorStreams | None = None
        self._bridge: Any = None
        self._beginning = asyncio.Lock()

    async def prepare(self, name: str) -> None:
        """Start the bridge on a node of Ray, unless it is there and answers. Raises RayError, TimeoutError."""
        async with self._beginning:
            if await self._checked() is not None:
                return
            affinity = NodeAffinitySchedulingStrategy(await _ray_node(name), soft=False)
            options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": affinity}
            bridge = ray.remote(Bridge).options(**options).remote(self._agent)
            try:
                await asyncio.wait_for(bridge.exchange.remote(NOTHING, 0.0), _BEGIN_S)
            except TimeoutError:
                raise _NoSuchNode(f"Ray starts no process on node {name} within {_BEGIN_S:g} s") from None
            self._bridge, self._exchange = bridge, ActorStreams(bridge.exchange.remote, self._on_lost)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Ended:
        """Carry a connection until it has ended."""
        exchange = await self._checked()
        if exchange is None:
            return Ended(None, "no bridge is ready")
        ended = await exchange.carry(reader, writer)
        if ended.code == NO_AGENT:
            self._lose(exchange, ended.said)
        return ended

    async def _checked(self) -> ActorStreams | None:
        """Return the exchange with a bridge that answers. Ray takes its time to say that one is behind a cut link."""
        if self._exchange is not None:
            await self._exchange.check(_CHECK_S)
        return self._exchange

    def _on_lost(self, exchange: ActorStreams, error: Exception) -> None:
        self._lose(exchange, f"the bridge to {self._agent} is lost ({str(error) or 'no answer'})")

    def _lose(self, exchange: ActorStreams, said: str) -> None:
        """Break all streams, and end the bridge. `prepare` starts another one."""
        exchange.close(said)
        if self._exchange is exchange:
            self._exchange = None
            ray.kill(self._bridge)


async def _ray_node(name: str) -> str:
    """Return Ray's identifier of a node. Asked first, because Ray would wait for a node that is not there."""
    nodes = await asyncio.wait_for(asyncio.to_thread(ray.nodes), _CALL_S)
    for node in nodes:
        if node["Alive"] and name in node["Resources"]:
            return str(node["NodeID"])
    raise _NoSuchNode(f"Ray has no node {name}")  # words: ok, read by skyward


class _NoSuchNode(RayError):  # type: ignore[misc]  # Ray has no types
    """Ray has no such node, or starts no process there, as without its keys. It is to be started there again."""


class _Door:
    """The socket that the head connects to."""

    def __init__(self) -> None:
        self._agents: dict[str, _Agent] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # the head has left
            order = json.loads(await reader.readline() or b"{}")
            if (ident := order.get("ended")) is not None:
                ended = self._ended.get(ident)
                writer.write(json.dumps(ended._asdict() if ended else {}).encode() + b"\n")
                await writer.drain()
            elif (agent := order.get("prepare")) is not None:
                writer.write(json.dumps(await self._prepare(agent, order["node"])).encode() + b"\n")
                await writer.drain()
            elif (agent := self._agents.get(order.get("agent", ""))) is not None:
                self._ended[order["id"]] = await agent.carry(reader, writer)
                while len(self._ended) > _REMEMBERED:
                    self._ended.popitem(last=False)
        writer.close()

    async def _prepare(self, agent: str, node: str) -> dict[str, object]:
        try:
            await self._agents.setdefault(agent, _Agent(agent)).prepare(node)
        except (RayError, TimeoutError) as error:
            return {"why": str(error) or "timed out", "is_lacking": isinstance(error, _NoSuchNode)}
        return {"ready": True}


async def _main() -> None:
    loop = asyncio.get_running_loop()
    order = json.loads(await loop.run_in_executor(None, sys.stdin.buffer.readline))
    here = {"_node_ip_address": order["here"]} if "here" in order else {}
    set_timer_slack(SLACK_S)
    ray.init(order["address"], namespace=order["pool"], log_to_driver=False, logging_level="ERROR", **here)
    set_timer_slack(USUAL_SLACK_S)
    os.umask(0o077)
    async with await asyncio.start_unix_server(_Door().on_connection, order["socket"]):
        sys.stdout.write(json.dumps({"listens": order["socket"]}) + "\n")
        sys.stdout.flush()
        await loop.run_in_executor(None, sys.stdin.buffer.read)


if __name__ == "__main__":
    asyncio.run(_main())
    os._exit(0)  # Ray's own end waits for its processes, which the watchdog ends
