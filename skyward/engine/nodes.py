"""Links to the agents of all nodes, and facts about their machines. `link_repair` repairs broken links."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import Unreachable
from ..events import Emit, NodeReady
from ..schedule.resources import PLAIN, Need, Supply
from ..values.devices import Device, NodeResources, describe
from ..values.machine import Machine
from ..values.topology import AcceleratorInfo
from ..wire.frames import FrameKind
from ..wire.tasks import Topology
from .ledger import Ledger
from .link import NodeLink
from .liveness import Liveness
from .opener import Opener
from .task_dispatcher import TaskDispatcher
from .threads import report, run_side_by_side, start_thread

if TYPE_CHECKING:
    from ..values.launch_facts import GangLaunch

_CONNECT_S = 20.0
_AGAIN_S = 0.2
"""Pause in seconds between two attempts to reach a node to which there may be a way later."""
_FINISH_S = 3.0
"""Seconds for the last frames to a remote node, and for the end of the command that carries them."""


def _accelerator_info(devices: tuple[Device, ...]) -> AcceleratorInfo | None:
    if not devices:
        return None
    first = devices[0]
    memory_gb = first.memory_gib * 2**30 / 1e9 if first.memory_gib else None
    return AcceleratorInfo(type=first.name, count=len(devices), memory_gb=memory_gb, is_trainium=first.kind == "aws")


def supply_of(resources: NodeResources) -> Supply:
    """Return what the scheduler knows of a node's resources."""
    names = tuple(device.name for device in resources.devices)
    return Supply(cpus=resources.cpus, memory_gib=resources.memory_gib, devices=names)


def _finish(link: NodeLink, deadline: float, is_ended: threading.Event) -> None:
    try:
        link.finish(deadline)
    finally:
        is_ended.set()


class NodeLinks:
    """Links to all nodes, and facts about the nodes.

    Call `up`, `watch` and `unwatch` with the ledger locked. Any thread may call everything else.

    Args:
        ledger: Shared state of the engine.
        dispatcher: Carries out the decisions of the scheduler.
        job_id: Name of the pool.
        initializer: Pickled (function, args) that each process of a node runs before its first call.
        emit: Takes events.
    """

    def __init__(
        self, ledger: Ledger, dispatcher: TaskDispatcher, *, job_id: str, initializer: bytes | None, emit: Emit
    ) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._job_id = job_id
        self._initializer = initializer
        self._emit = emit
        self._usage_tenths = 0
        self.on_up: list[Callable[[int], object]] = []
        """Functions that get the number of each node that is there now, under the ledger's lock."""
        self.opener = Opener(job_id, timeout_s=_CONNECT_S)
        self.liveness = Liveness()

    # Up and down ----------------------------------------------------------------------------------------------------

    def open(self, machines: Sequence[Machine]) -> None:
        """Connect to all agents.

        Raises:
            Unreachable: An agent does not answer. All links are closed again.
        """
        self._ledger.machines.update((machine.node, machine) for machine in machines)
        self._ledger.links.update(self.opener.open_all(machines))

    def open_again(
        self, machines: Sequence[Machine], needed: str = "", *, until: float | None = None
    ) -> frozenset[int]:
        """Connect to agents that were there before, and return the nodes that answer.

        Args:
            machines: Machines of the nodes.
            needed: Folder of the node without which there is nothing to do.
            until: Time (monotonic) until which the other nodes are tried, because there may be a way to them later;
                None: they are tried once.

        Raises:
            Unreachable: The node with the folder `needed` does not answer.
        """
        failed: list[Unreachable] = []

        def open_one(machine: Machine) -> None:
            try:
                if until is None or machine.folder == needed:
                    link = self.opener.open(machine)
                else:
                    link = self._open_until(machine, until)
            except Unreachable as error:
                if machine.folder == needed:
                    failed.append(error)
            else:
                self._ledger.links[machine.node] = link

        run_side_by_side([partial(open_one, machine) for machine in machines])
        if failed:
            raise failed[0]
        return frozenset(self._ledger.links)

    def _open_until(self, machine: Machine, until: float) -> NodeLink:
        """Try to connect to an agent that was there before. Raises Unreachable: it is gone, or does not answer."""
        from .dialler import Forgotten  # nodes on this machine do without

        while True:
            try:
                return self.opener.open(machine, until=until, is_known=True)
            except Forgotten as error:
                raise Unreachable(f"node {machine.node}: {error}; open the pool again", node=None) from error
            except Unreachable:
                if time.monotonic() + _AGAIN_S > until:
                    raise
            time.sleep(_AGAIN_S)

    def up(self, machine: Machine) -> None:
        """Send a connected node its topology, and let the scheduler use it."""
        link = self._ledger.links[machine.node]
        self.watch(link)
        self._send_topology(link)
        if self._usage_tenths:
            link.send(FrameKind.USAGE, lane=self._usage_tenths)
        devices = describe(link.resources.devices)
        limits = link.facts.get("limits", "")
        self._emit(NodeReady(node=machine.node, address=machine.peer.private_ip, devices=devices, limits=limits))
        supply = supply_of(link.resources)
        self._dispatcher.perform(self._ledger.scheduler.node_up(machine.node, machine.slots, supply))
        for on_up in self.on_up:
            on_up(machine.node)

    def tell_all(self) -> None:
        """Send all nodes the topology again, because nodes came or went."""
        for link in self._ledger.links.values():
            self._send_topology(link)

    def _send_topology(self, link: NodeLink) -> None:
        machine, machines = self._ledger.machines[link.node], self._ledger.machines
        count = max(machines) + 1
        topology = Topology(
            job_id=self._job_id,
            node=machine.node,
            peers=tuple(machines[n].peer if n in machines else None for n in range(count)),
            accelerators=tuple(self.accelerators(n) for n in range(count)),
            accelerator=_accelerator_info(link.resources.devices),
            interface=machine.interface,
            initializer=self._initializer,
        )
        link.send(FrameKind.SLOT_CONFIG, body=pickle.dumps(topology))
        self._ledger.dirty.add(link)

    def watch(self, link: NodeLink) -> None:
        """Read a link from now on, and check that it is alive."""
        self._ledger.watcher.add(link)
        if link.dialler is not None:
            self.liveness.watch(link, self._ledger.machines[link.node].lease_s, time.monotonic())
        self._ledger.dirty.add(link)

    def unwatch(self, link: NodeLink) -> None:
        """Stop reading a link. Call it before its channel is closed."""
        link.is_led = link.is_blocked = False
        self._ledger.watcher.remove(link)
        self.liveness.forget(link)
        self._ledger.dirty.discard(link)

    def close(self) -> None:
        """Flush the links to remote nodes in parallel for at most a few seconds, and close all links."""
        links = list(self._ledger.links.values())
        deadline = time.monotonic() + _FINISH_S
        remote = [link for link in links if link.dialler is not None]
        ended = {link: threading.Event() for link in remote}
        for link in remote:
            start_thread(partial(_finish, link, deadline, ended[link]), name="skyward-finish", failed=report)
        for is_ended in ended.values():
            is_ended.wait(max(0.0, deadline + 1 - time.monotonic()))
        for link in links:
            link.close()
            if link.line is not None:
                link.line.channel.close()

    def close_in_child(self) -> None:
        """Close the child's copies of the descriptors after a fork."""
        for link in self._ledger.links.values():
            link.channel.close_in_child()
            if link.line is not None:
                link.line.channel.close_in_child()

    # Facts ----------------------------------------------------------------------------------------------------------

    def accelerators(self, node: int) -> int:
        """Return the number of accelerators of a node; 0 while it is down."""
        return len(self.devices(node))

    def devices(self, node: int) -> tuple[Device, ...]:
        """Return the accelerators that calls see on a node; none while it is down. Nodes can share accelerators."""
        link = self._ledger.links.get(node)
        return link.resources.devices if link else ()

    def resources(self, node: int) -> NodeResources | None:
        """Return what the calls of a node share; None while it is down."""
        link = self._ledger.links.get(node)
        return link.resources if link else None

    def refusal(self, nodes: tuple[int, ...] | None, need: Need | None, count: int) -> str:
        """Return why this number of nodes can never hold a need; "" if they can, or if a node is not known yet."""
        with self._ledger.lock:
            return self._ledger.scheduler.refusal(nodes, need or PLAIN, count)

    def ranks_per_node(self, launch: GangLaunch) -> int:
        """Return the number of ranks per node; for "auto", the fewest accelerators of any node, and at least 1."""
        ranks = launch.ranks_per_node
        if ranks != "auto":
            return ranks
        return max(1, min((self.accelerators(n) for n in self._ledger.links), default=0))

    @property
    def round_trip_s(self) -> float:
        """Longest round trip to a node; 0 on this machine, or before it is measured."""
        return max((link.channel.round_trip_s for link in tuple(self._ledger.links.values())), default=0.0)

    def agent_pids(self) -> dict[int, int]:
        """Return the process ids of the agents, each on its own machine, by node."""
        with self._ledger.lock:
            return {node: int(link.facts["pid"]) for node, link in self._ledger.links.items()}

    @property
    def are_attached(self) -> bool:
        """Return whether no link is broken."""
        return all(link.channel.is_attached for link in self._ledger.links.values())

    def ask_usage(self, every_s: float) -> None:
        """Ask all nodes for NodeUsage at this interval; 0: stop."""
        with self._ledger:
            self._usage_tenths = int(every_s * 10)
            for node in self._ledger.links:
                self._ledger.tell(node, FrameKind.USAGE, lane=self._usage_tenths)
