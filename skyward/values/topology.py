"""Topology as plain values: the nodes of a pool, and the ranks of a gang."""

from __future__ import annotations

import os
import socket

from ..core.frozenmap import FrozenMap
from ..core.records import dataclass
from .devices import Device


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another node of the pool. `node` is its index, 0 is the head; an unknown address is None."""

    node: int
    private_ip: str
    public_ip: str | None = None


@dataclass(frozen=True, kw_only=True)
class AcceleratorInfo:
    """Accelerators of one node, all of one type. `memory_gb` is the memory of each, in units of 10^9 bytes."""

    type: str
    count: int
    memory_gb: float | None = None
    is_trainium: bool = False


@dataclass(frozen=True, kw_only=True)
class NetworkInfo:
    """Interface of the pool's private network; `bandwidth_gbps` is None if it is not known."""

    interface: str
    bandwidth_gbps: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One process of a gang.

    `rank` is in [0, world_size), and `local_rank` in [0, local_world_size) on its node. `node` is the node's index in
    the pool, and `node_rank` its index among the `nodes` of this gang. `head_addr:head_port` is the rendezvous address,
    on the node of rank 0. `local_addr` is this node's own address on the same network.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    node_rank: int
    nodes: int
    head_addr: str
    head_port: int
    local_addr: str
    accelerators: int = 0
    """Number of accelerators that the process sees."""
    devices: tuple[int, ...] = ()
    """The rank's own accelerators, as indexes among those. There are others if an integration `sees_neighbours`."""
    peers: tuple[Peer, ...] = ()
    """Nodes of this gang, in the order of `node_rank`."""
    interface: str = ""
    """Network interface of `local_addr`; empty if it is not known."""
    restart_count: int = 0
    """Earlier starts of the gang in this call."""
    shares_devices: bool = False
    """Whether two ranks of the gang must share an accelerator, because there are more ranks than accelerators on a
    node, or on a machine with several nodes.
    """


@dataclass(frozen=True, kw_only=True)
class InstanceInfo:
    """Place of the running call. `sky.instance_info()` returns it on a node, and None elsewhere.

    Args:
        node: Index of this node, in [0, total_nodes).
        worker: Slot on this node, in [0, workers_per_node); the local rank in a gang.
        total_nodes: Number of nodes of the pool.
        workers_per_node: Slots per node; ranks per node in a gang.
        accelerators: Accelerators that this process sees; 0 on CPU machines.
        total_accelerators: Accelerators of the pool.
        head_addr: Address of the call's head: the node with `is_head` in a broadcast or gang, node 0 in a plain call.
        head_port: Port of the gang's rendezvous; 0 for other calls.
        job_id: Unique name of the pool.
        peers: The nodes.
        accelerator: Type of this node's accelerators, or None.
        devices: Accelerators that are this process's own: the share of a slot or rank. Others may be visible; see
            `sky.integrations.torch`.
        cpus: Processors that the call books by `cpus=`, or None. The ranks of a gang share them on each node.
        memory_gib: Memory that it books by `memory_gib=`, or None. Shared likewise.
        enforced: Those of "cpus" and "memory_gib" that the kernel enforces for this process, by control groups.
        network: Private network, or None.
        rank: Rank in the gang, or None.
        local_rank: Rank on this node, or None.
        world_size: Number of ranks of the gang, or None.
        restart_count: Earlier starts of the gang in this call; see `max_restarts`.
        part: Index of this process among the `parts` that run the call, in [0, parts): the rank in a gang, the position
            of the node in a broadcast. None in a plain call, which one process runs.
        parts: Number of processes that run the call, or None.
        notice_file: File on this node that exists once `is_preempted`; empty if the provider takes no machine back.
        volumes: Folder of each volume of the pool, by the path under which the pool names it; see `sky.volume`.

    Example:
        >>> import skyward as sky
        >>> @sky.compute
        ... def greet() -> str:
        ...     info = sky.instance_info()
        ...     return f"node {info.node} of {info.total_nodes}" if info else "here"
        >>> greet.local()
        'here'
    """

    node: int
    worker: int
    total_nodes: int
    workers_per_node: int
    accelerators: int
    total_accelerators: int
    head_addr: str
    head_port: int
    job_id: str
    peers: tuple[Peer, ...] = ()
    accelerator: AcceleratorInfo | None = None
    network: NetworkInfo | None = None
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    restart_count: int = 0
    part: int | None = None
    parts: int | None = None
    notice_file: str = ""
    """File on this node that exists once `is_preempted`; empty if the provider takes no machine back."""
    volumes: FrozenMap[str] = FrozenMap()  # immutable
    """Folder of each volume of the pool, by the path under which the pool names it."""
    devices: tuple[Device, ...] = ()
    """Accelerators that are this process's own."""
    cpus: float | None = None
    """Processors that the call books, or None."""
    memory_gib: float | None = None
    """Memory that the call books, or None."""
    enforced: tuple[str, ...] = ()
    """Those of "cpus" and "memory_gib" that the kernel enforces for this process."""

    @property
    def is_preempted(self) -> bool:
        """Return whether the provider has announced that it takes this node's machine back (EC2: two minutes ahead).

        True on that node only, a few seconds after the announcement. Each access checks again and takes microseconds,
        so a loop that saves its state can check in every step.
        """
        return bool(self.notice_file) and os.path.exists(self.notice_file)

    @property
    def global_worker_index(self) -> int:
        """Index among `total_workers`: `part` in a broadcast or gang, the slot's number in the pool in a plain call.

        In a broadcast or gang, `data[info.global_worker_index :: info.total_workers]` covers the data exactly once.
        """
        return self.node * self.workers_per_node + self.worker if self.part is None else self.part

    @property
    def total_workers(self) -> int:
        """Number of workers: `parts` in a broadcast or gang, the slots of all nodes in a plain call."""
        return self.total_nodes * self.workers_per_node if self.parts is None else self.parts

    @property
    def is_head(self) -> bool:
        """Return whether this is the first of the processes that run the call. Exactly one of them is.

        It is rank 0 of a gang, the first chosen node of a broadcast, and every plain call.
        """
        return not self.part

    @property
    def hostname(self) -> str:
        """Host name of this node."""
        return socket.gethostname()
