"""Who is where: the nodes of a pool and the ranks of a gang, as plain values."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

__all__ = ["AcceleratorInfo", "InstanceInfo", "NetworkInfo", "Peer", "Rank"]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another node of the pool. `node` is its index, 0 is the head; addresses are None where there is none."""

    node: int
    private_ip: str
    public_ip: str | None = None


@dataclass(frozen=True, kw_only=True)
class AcceleratorInfo:
    """The accelerators of one node: all of one type. `memory_gb` is of each, in units of 10^9 bytes."""

    type: str
    count: int
    memory_gb: float | None = None
    is_trainium: bool = False


@dataclass(frozen=True, kw_only=True)
class NetworkInfo:
    """The interface that carries the pool's private network; `bandwidth_gbps` is None where it is not known."""

    interface: str
    bandwidth_gbps: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One process of a gang.

    `rank` in [0, world_size); `local_rank` in [0, local_world_size) on its node; `node` is the node's index in the
    pool and `node_rank` its index among the `nodes` of this gang. `head_addr:head_port` is the rendezvous, on the
    node of rank 0; `local_addr` is this node's own address on the same network.
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
    peers: tuple[Peer, ...] = ()
    """The nodes of this gang, in the order of `node_rank`."""
    interface: str = ""
    """The network interface that carries `local_addr`; empty where it is not known."""
    restart_count: int = 0
    """How often the gang was started before, in this call."""
    shares_devices: bool = False
    """Whether two ranks of the gang have to use one accelerator: a node runs more ranks than it has, or several
    nodes are on one machine that has fewer.
    """


@dataclass(frozen=True, kw_only=True)
class InstanceInfo:
    """Where the running call is; `sky.instance_info()` gives it on a node and None elsewhere.

    `node` in [0, total_nodes); `worker` in [0, workers_per_node) is the slot on this node (the local rank in a gang).
    `accelerators` is this node's count (0 on CPU), `total_accelerators` the pool's. `head_addr` is the address of the
    call's head: the node where `is_head` is true in a broadcast and in a gang, node 0 in a plain call. `head_port` is
    the port of a gang's rendezvous, and 0 for calls that have none. `rank`, `local_rank` and `world_size` are those of
    the gang, and None otherwise; `restart_count` says how often the gang was started before in this call, see
    `max_restarts`. `part` in [0, parts) is this process's place among the `parts` processes that run the call: the
    rank in a gang, the node's place in a broadcast; both are None in a plain call, which one process runs.
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
    """A file of this node that is there once `is_preempted`; empty: its provider takes no machine back."""

    @property
    def is_preempted(self) -> bool:
        """Whether the provider has announced that it takes this node's machine back: EC2, two minutes ahead.

        True on that node alone, a few seconds after the announcement. It is looked up each time (microseconds), so a
        loop that saves its state can ask once for each step.
        """
        return bool(self.notice_file) and os.path.exists(self.notice_file)

    @property
    def global_worker_index(self) -> int:
        """`part` in a broadcast and in a gang; in a plain call, the number of the slot among those of all nodes.

        `data[info.global_worker_index :: info.total_workers]` covers the data exactly once in a broadcast or a gang.
        """
        return self.node * self.workers_per_node + self.worker if self.part is None else self.part

    @property
    def total_workers(self) -> int:
        """`parts` in a broadcast and in a gang; in a plain call, the slots of all nodes."""
        return self.total_nodes * self.workers_per_node if self.parts is None else self.parts

    @property
    def is_head(self) -> bool:
        """Whether this is the first of the processes that run the call: exactly one of them is.

        Rank 0 of a gang, the first node of a broadcast (of those it was sent to), always in a plain call.
        """
        return not self.part

    @property
    def hostname(self) -> str:
        return socket.gethostname()
