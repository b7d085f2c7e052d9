"""Reach between nodes before Ray is raised: whether each of them can connect to each other one.

Ray waits for minutes where it cannot connect, and does not say why. So each node listens for a moment on a port of its
own, and connects to those of all others. Ray needs more ports than that one, but firewalls rarely part them.

    python -S -E -s -c "...probe()" < JSON      prints one line of JSON: reasons by the nodes that it cannot connect to
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from ...errors import RendezvousFailed, SkywardError
from ...node.agent.outside import reply_of
from ...node.slot.ports import PORTS, PortLocks
from ...values.machine import Machine
from ..threads import run_side_by_side

_LIMIT_S: Final = 5.0
"""Longest time in seconds that a node listens and tries. Nodes that reach each other are done in a fraction of it."""
_CONNECT_S: Final = 2.0
_AGAIN_S: Final = 0.1
_MORE_S: Final = 10.0
"""Seconds for a login beyond what it runs."""
_NAMED: Final = 3
"""Most pairs of nodes that a text names."""

Place = tuple[str, int]
"""Address and port."""


def why_cut(machines: Sequence[Machine], stop: threading.Event) -> str:
    """Return why Ray cannot join nodes, and what to do; empty: they reach each other, as far as can be found out.

    Args:
        machines: Machines; those without a login are left out.
        stop: Another thread sets it to end the search.
    """
    reachable = [machine for machine in machines if machine.login is not None]
    cut = broken_paths(reachable, stop) if len(reachable) > 1 else ""
    return cut and f"network: {cut}; let the nodes' private addresses reach each other on all ports"


def broken_paths(machines: Sequence[Machine], stop: threading.Event) -> str:
    """Return which nodes cannot connect to which; empty: all of them can, as far as can be found out.

    It takes a fraction of a second, or a few seconds if the answer is not empty: a busy node may begin too late, so the
    nodes then try a second time. Nodes whose login fails, or whose port is taken, are left out.

    Args:
        machines: Machines with a login.
        stop: Another thread sets it to end the search.
    """
    return _broken_paths(machines, stop) and _broken_paths(machines, stop)


def _broken_paths(machines: Sequence[Machine], stop: threading.Event) -> str:
    ports = random.sample(PORTS, len(machines))
    places = {machine.node: (machine.peer.private_ip, port) for machine, port in zip(machines, ports, strict=True)}
    replies: dict[int, dict[str, str]] = {}

    def ask(machine: Machine) -> None:
        assert machine.login is not None
        order = json.dumps({"node": machine.node, "places": places, "limit_s": _LIMIT_S}).encode()
        with contextlib.suppress(SkywardError, TimeoutError, OSError):  # a lost node says nothing about the network
            done = machine.login.run("engine.ray.reach", "probe", input=order, timeout_s=_LIMIT_S + _MORE_S, stop=stop)
            if not done.code:
                replies[machine.node] = reply_of(done.text)

    run_side_by_side([lambda each=machine: ask(each) for machine in machines])  # type: ignore[misc]
    cut = [
        f"node {node} at {places[node][0]} cannot connect to node {other} at {_text(places[int(other)])} ({why})"
        for node, reasons in sorted(replies.items())
        for other, why in reasons.items()
        if int(other) in replies
    ]
    more = f", and so for {len(cut) - _NAMED} more pairs" if len(cut) > _NAMED else ""
    return ", ".join(cut[:_NAMED]) + more


def _text(place: Place) -> str:
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# On the node --------------------------------------------------------------------------------------------------------


def probe() -> int:
    """Connect to the other nodes while they connect to this one."""
    import asyncio  # only here, because it takes a while

    order = json.load(sys.stdin)
    node, places = order["node"], {int(node): tuple(place) for node, place in order["places"].items()}
    host, port = places[node]
    locks = PortLocks(host)
    try:
        locks.hold(port)
        reasons = asyncio.run(reasons_of(node, places, order["limit_s"]))
    except (RendezvousFailed, OSError) as error:  # the port is taken
        sys.stderr.write(str(error))
        return 1
    finally:
        locks.release_all()
    sys.stdout.write(json.dumps(reasons) + "\n")
    return 0


async def reasons_of(node: int, places: Mapping[int, Place], limit_s: float) -> dict[int, str]:
    """Return why this node cannot connect to others, by their numbers.

    It ends as soon as this node has connected to all others and they to it, or after the limit.

    Raises:
        OSError: The port of this node is taken.
    """
    import asyncio

    others = {other: place for other, place in places.items() if other != node}
    reasons = dict.fromkeys(others, "no answer")
    waiting, is_heard = {str(other) for other in others}, asyncio.Event()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):  # a stranger's line may be endless
                waiting.discard((await reader.readline()).decode(errors="replace").strip())
        finally:
            writer.close()
        if not waiting:
            is_heard.set()

    async def connect(other: int, host: str, port: int) -> None:
        while True:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _CONNECT_S)
            except TimeoutError:
                reasons[other] = "no answer"
            except OSError as error:
                # The text of asyncio names the place, as ours does.
                reasons[other] = os.strerror(error.errno or errno.EIO).lower()
            else:
                writer.write(f"{node}\n".encode())
                writer.close()
                del reasons[other]
                return
            await asyncio.sleep(_AGAIN_S)  # the other one may not have begun to listen

    server = await asyncio.start_server(hear, port=places[node][1])
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await asyncio.gather(is_heard.wait(), *(connect(other, *place) for other, place in others.items()))
    finally:
        server.close()
    return reasons
