"""The driver on a machine of a Ray cluster: it asks for room, and leads to commands on the nodes that it got.

The process reads its order from standard input, one line of JSON, and prints one line when it listens, or why it does
not. A connection to its socket sends one line of JSON:

    {"place": {NODE: RESOURCES}, "limit_s": S}    asks for room: lines {"waits": ...}, then {"placed": ...} or a problem
    {"id": I, "node": NODE, "command": "..."}     from then on the connection is the command's input and output
    {"ended": I}                                  asks how that command ended; {} if it has not
    {"release": {NODE: TICKET}}                   gives room back

Once nobody has room anymore and nobody waits for any, the driver ends. It also ends when nobody has been connected for
`lease_s`. With it, Ray removes the placement groups and the bridges.

Every wait on Ray has a limit here: a driver without the right certificate waits for minutes, and raises nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final, NoReturn

import ray
import ray.cloudpickle
from ray.exceptions import RayError
from ray.util import accelerators
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...wire import carried
from ...wire.exchange import ActorStreams
from . import bridge as bridges

_INIT_S: Final = 60
"""Longest time for Ray to take this driver."""
_CALL_S: Final = 20.0
"""Longest time for Ray to answer a question."""
_BEGIN_S: Final = 60.0
"""Longest time for a bridge to start: Ray starts a process for it."""
_OPEN_S: Final = 20.0
"""Longest time for a bridge to start a command."""
_LOOK_S: Final = 1.0
_DEVICES: Final = "TPU", "neuron_cores"
"""Devices that Ray counts like any resource; it has an option of its own for GPUs."""
_TYPE: Final = "accelerator_type:"
_PLAIN_WORDS: Final = frozenset({"AMD", "Instinct", "GeForce", "OAM", "HF"})
"""Words in Ray's names of accelerators that tell no two apart."""
_REMEMBERED: Final = 1000
"""Ends of commands that are known."""


class _Node:
    """One bundle of a placement group, and the bridge there."""

    def __init__(self, group: Any, index: int, bundle: dict[str, float]) -> None:
        self.group, self.bundle = group, bundle
        self._index = index
        self._ray_node = ""
        self._moved = ""
        """Reason for which no command can reach the node anymore, until the bundle begins again."""
        self.ticket = ""
        """Name of the stay in this bundle, so that the end of an earlier one does not end it."""
        self._exchange: ActorStreams | None = None
        self._bridge: Any = None
        self._beginning = asyncio.Lock()

    async def begin(self, limit_s: float) -> dict[str, str]:
        """Start a bridge where the bundle is now, and describe that node. Raises RayError, TimeoutError."""
        async with self._beginning:
            self._lose("the bundle begins again")
            facts = await self._start(limit_s)
            self._ray_node, self._moved = facts["ray_node"], ""
            self.ticket = facts["ticket"] = os.urandom(6).hex()
            return facts

    async def run(self, command: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> carried.Ended:
        """Run a command on the node, with a connection as its input and output."""
        try:
            async with self._beginning:
                # The client tries again until the lease is over, and each bridge is a process. A bundle never comes
                # back, because Ray gives each raylet another identifier.
                if self._exchange is None and not self._moved:
                    facts = await self._start(_BEGIN_S)
                    if facts["ray_node"] != self._ray_node:
                        self._lose("")
                        self._moved = f"Ray has moved the bundle to {facts['address']}"
                if self._moved:
                    return carried.Ended(None, self._moved)
                exchange = self._exchange
        except (RayError, TimeoutError) as error:
            return carried.Ended(None, f"no bridge: {str(error) or 'timed out'}")
        assert exchange is not None
        return await exchange.carry(reader, writer, to=command.encode(), open_s=_OPEN_S)

    async def _start(self, limit_s: float) -> dict[str, str]:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self._index)
        # Only a process that takes the devices is told which ones they are.
        options = {
            "num_cpus": 0,
            "num_gpus": self.bundle.get("GPU", 0),
            "resources": {name: self.bundle[name] for name in _DEVICES if name in self.bundle},
            "max_restarts": 0,
            "scheduling_strategy": strategy,
        }
        bridge = ray.remote(bridges.ShellBridge).options(**options).remote()
        try:
            facts: dict[str, str] = await asyncio.wait_for(bridge.describe.remote(), limit_s)
        except BaseException:
            ray.kill(bridge)
            raise
        self._bridge = bridge
        self._exchange = ActorStreams(
            lambda batch, wait_s: bridge.exchange.remote(batch.number, batch.body, wait_s),
            lambda _, error: self._lose(f"the bridge is lost: {str(error) or 'no answer'}"),
        )
        return facts

    def end(self) -> None:
        """End the bridge, and with it what it carries. The agent lives on, as after a lost login."""
        self._lose("the node was given back")

    def _lose(self, said: str) -> None:
        """Break all streams, and end the bridge; the next command starts another one."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            ray.kill(self._bridge)
            exchange.close(said)


class _StubServer:
    """The socket that stubs connect to."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._nodes: dict[int, _Node] = {}
        self._spare: list[_Node] = []
        """Bundles that nobody uses, of groups that others use: Ray gives back whole groups only."""
        self._ended: OrderedDict[str, carried.Ended] = OrderedDict()
        self._has_begun = False
        """Whether anyone has asked for room. A release before that is of a node that an earlier driver had."""
        self._placing = 0
        """Number of requests for room that are not answered yet."""
        self._connected = 0
        self._left_at = time.monotonic()
        self._is_over = asyncio.Event()

    async def until_over(self) -> None:
        """Wait until all nodes were released, or nobody has been connected for the lease."""
        while not self._is_over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), min(_LOOK_S, self._lease_s / 4))
            if not self._connected and time.monotonic() > self._left_at + self._lease_s:
                return

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connected += 1
        try:
            with contextlib.suppress(OSError):  # the stub has left
                await self._serve(json.loads(await reader.readline() or b"{}"), reader, writer)
        finally:
            self._connected -= 1
            self._left_at = time.monotonic()
            writer.close()

    async def _serve(self, order: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if "command" in order:
            node = self._nodes.get(order["node"])
            unknown = carried.Ended(None, f"node {order['node']} has no bundle")
            self._ended[order["id"]] = await node.run(order["command"], reader, writer) if node else unknown
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        elif "ended" in order:
            ended = self._ended.get(order["ended"])
            await _tell(writer, ended._asdict() if ended else {})
        elif "place" in order:
            self._has_begun = True
            self._placing += 1
            try:
                placing = asyncio.ensure_future(self._place(order, writer))
                leaving = asyncio.ensure_future(reader.read())  # ends when the client no longer waits
                await asyncio.wait([placing, leaving], return_when=asyncio.FIRST_COMPLETED)
                leaving.cancel()
                placing.cancel()
                await asyncio.wait([placing])
            finally:
                self._placing -= 1
                self._end_if_unused()
        elif "release" in order:
            tickets = {int(node): ticket for node, ticket in order["release"].items()}
            await self._release([node for node, ticket in tickets.items() if self._has(node, ticket)])
            await _tell(writer, {"released": True})
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        """End unless somebody has room here, or waits for it, or is about to ask."""
        if self._has_begun and not self._placing and not self._nodes:
            self._is_over.set()

    # Room -----------------------------------------------------------------------------------------------------------

    async def _place(self, order: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Get room for nodes: new ones by a placement group, known ones wherever their bundle is now."""
        there: dict[str, float] = {}
        with contextlib.suppress(TimeoutError, RayError):  # Ray's own names of accelerators serve
            there = await asyncio.wait_for(asyncio.to_thread(ray.cluster_resources), _CALL_S)
        wanted = {int(node): _in_ray(resources, there) for node, resources in order["place"].items()}
        deadline = time.monotonic() + order["limit_s"]
        new = [node for node in wanted if node not in self._nodes]
        try:
            for node in new:
                spare = next((spare for spare in self._spare if spare.bundle == wanted[node]), None)
                if spare is not None:
                    self._spare.remove(spare)
                    self._nodes[node] = spare
            if asked := [node for node in new if node not in self._nodes]:
                group = placement_group([wanted[node] for node in asked], strategy="STRICT_SPREAD")
                for index, node in enumerate(asked):
                    self._nodes[node] = _Node(group, index, wanted[node])
            for group in {self._nodes[node].group.id: self._nodes[node].group for node in wanted}.values():
                await self._until_ready(group, list(wanted.values()), deadline, writer)
            left_s = max(_BEGIN_S, deadline - time.monotonic())
            facts = await asyncio.gather(*(self._nodes[node].begin(left_s) for node in wanted))
            await _tell(writer, {"placed": dict(zip(wanted, facts, strict=True))})
        except _Lacking as lacking:
            await self._release(new)
            await _tell(writer, {"lacking": str(lacking)})
        except TimeoutError:
            await self._release(new)
            await _tell(writer, {"problem": "a bridge did not start in time"})
        except Exception as error:  # by Ray; the client raises it
            await self._release(new)
            await _tell(writer, {"problem": f"{type(error).__name__}: {error}"})
        except BaseException:  # nobody waits anymore
            await self._release(new)
            raise

    async def _until_ready(
        self, group: Any, bundles: list[dict[str, float]], deadline: float, writer: asyncio.StreamWriter
    ) -> None:
        said = ""
        while not await asyncio.to_thread(group.wait, _LOOK_S):
            lacks = await asyncio.wait_for(asyncio.to_thread(_lacks, bundles), _CALL_S)
            if time.monotonic() > deadline:
                raise _Lacking(lacks)
            if lacks != said:
                said = lacks
                await _tell(writer, {"waits": lacks})

    def _has(self, node: int, ticket: str) -> bool:
        return node in self._nodes and self._nodes[node].ticket == ticket

    async def _release(self, nodes: list[int]) -> None:
        for node in nodes:
            if (released := self._nodes.pop(node, None)) is not None:
                released.end()
                self._spare.append(released)
        held = [node.group for node in self._nodes.values()]
        unused = [spare for spare in self._spare if spare.group not in held]
        self._spare = [spare for spare in self._spare if spare not in unused]
        for group in {spare.group.id: spare.group for spare in unused}.values():
            with contextlib.suppress(TimeoutError, RayError):  # it goes with this process
                await asyncio.wait_for(asyncio.to_thread(remove_placement_group, group), _CALL_S)


class _Lacking(Exception):
    """A placement group that stays pending."""


def _in_ray(resources: dict[str, Any], there: Iterable[str]) -> dict[str, float]:
    """Return a bundle. The accelerator's name is one of the cluster's resources `there`, or else of Ray's."""
    name = _plain(str(resources.pop("accelerator", "")))
    types = [resource.removeprefix(_TYPE) for resource in there if resource.startswith(_TYPE)]
    known = [value for value in vars(accelerators).values() if isinstance(value, str)]
    found = next((value for value in (*sorted(types), *known) if name and _plain(value) == name), None)
    return resources if found is None else resources | {_TYPE + found: 0.001}


def _plain(name: str) -> str:
    words = name.replace(" ", "-").replace("_", "-").split("-")
    return "".join(word for word in words if word not in _PLAIN_WORDS).lower().replace("v5litepod", "v5e")


def _lacks(bundles: list[dict[str, float]]) -> str:
    """Describe what a placement group waits for, in words."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources()
    bundle = bundles[0]
    large = sum(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes)
    has = ", ".join(f"{free.get(name, 0):g} of {name} free" for name in bundle)
    wants = ", ".join(f"{name}={amount:g}" for name, amount in bundle.items())
    count = f"{len(bundles)} nodes, each" if len(bundles) > 1 else "a node"
    return f"it asks for {count} with {wants}; {large} of the cluster's {len(nodes)} nodes are that large, with {has}"


async def _tell(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(json.dumps(answer).encode() + b"\n")
    await writer.drain()


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def _serve(order: dict[str, Any]) -> None:
    server = _StubServer(order["lease_s"])
    os.umask(0o077)
    async with await asyncio.start_unix_server(server.on_connection, order["socket"]):
        _say({"listens": order["socket"]})
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 1)
        await server.until_over()
        _leave(order)  # here: the end of the loop would wait for connections, and for threads that wait for Ray


def _leave(order: dict[str, Any]) -> NoReturn:
    shutil.rmtree(os.path.dirname(order["socket"]), ignore_errors=True)
    os._exit(0)  # Ray's own end waits for its processes, which its head ends


def main() -> None:
    order = json.loads(sys.stdin.buffer.readline())
    signal.alarm(_INIT_S)  # ends this process, which the starter reports: Ray may wait where Python runs no handler
    try:
        ray.init(order["address"], namespace=order["pool"], log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # by Ray; the client raises it
        _say({"problem": str(error)})
        os._exit(1)
    signal.alarm(0)
    for module in (carried, bridges):
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        asyncio.run(_serve(order))
    finally:
        _leave(order)
