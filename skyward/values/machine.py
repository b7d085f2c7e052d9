"""Machines as values: what a pool asks for, what a provider offers, what an engine gets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..accelerators import Accelerator
from .allocation import AllocationStrategy
from .image import DEFAULT_IMAGE, Image
from .topology import Peer

__all__ = ["PREEMPTED", "Gone", "LogLine", "LogSink", "Machine", "Machines", "Offer", "PoolSpec"]


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """What a pool asks of its provider; see `ComputePool` for the fields. None: whatever there is."""

    nodes: int = 1
    concurrency: int = 1
    executor: Literal["process", "thread"] = "process"
    accelerator: Accelerator | None = None
    vcpus: int | None = None
    memory_gib: float | None = None
    architecture: Literal["x86_64", "arm64"] | None = None
    allocation: AllocationStrategy = "spot-if-available"
    image: Image = DEFAULT_IMAGE
    preload: tuple[str, ...] = ()
    max_hourly_cost: float | None = None
    cancel_grace_s: float = 3.0
    provision_timeout_s: float = 300.0
    code: Any = field(default=None, compare=False, repr=False)
    """What of the user's code travels (`skyward.bootstrap.code.Code`); None where nodes read the client's files."""
    stop: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)
    """Set once nobody waits for its machines any more: what is being launched is ended instead."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A kind of machine that a provider can launch now. `price_usd_per_hour` is for one, 0 where it is yours."""

    provider: str
    instance_type: str
    vcpus: int
    memory_gib: float
    accelerator: Accelerator | None = None
    is_spot: bool = False
    price_usd_per_hour: float = 0.0
    architecture: Literal["x86_64", "arm64"] | None = None
    region: str = ""
    zone: str = ""
    price_source: str = ""
    """Where the price is from, and of when."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node with a running agent. `handle` is the provider's own; everything else is plain data.

    `socket_path` and `folder` are on the node. A client on the same machine connects to the socket; any other runs
    `channel`.
    """

    node: int
    socket_path: str
    folder: str
    pid: int
    """Of the node's watchdog where that runs on this machine; 0 where it does not."""
    peer: Peer
    slots: int
    lease_s: float
    interface: str = ""
    channel: tuple[str, ...] = ()
    """A command of this machine whose standard input and output are a new channel to the agent; empty: the socket.

    It ends when its input does. Whoever runs it may kill it at any time, and run it again."""
    terminal: tuple[str, ...] = ()
    """A command of this machine that opens a shell of the user's there, on the terminal it is run on; with one more
    argument, a line of sh, it runs that instead. Empty: there is nowhere to log in."""
    offer: Offer | None = None
    """What it was rented by; None where machines are not rented."""
    handle: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Gone:
    """Why a machine certainly no longer runs. `is_preempted`: its provider took it back."""

    reason: str
    is_preempted: bool = False


PREEMPTED = Gone(reason="the provider took it back", is_preempted=True)


class Machines(Protocol):
    """The source of machines, as far as an engine needs it."""

    def replace(self, node: int) -> Machine | None:
        """Another machine in the place of a lost one; None: there will be none. May block; may raise.

        It may be called again where what it gave cannot be reached: that is ended first.
        """
        ...

    def prepare_replacement(self, node: int) -> bool:
        """Launch now what `replace` will give: the node's machine will soon be taken. May block; may raise.

        False: there is none now, and `replace` will look for one then.
        """
        ...

    def give_up(self, node: int) -> None:
        """There will be no other machine for the node: end what there is of it. May block; may raise."""
        ...

    def why_gone(self, node: int) -> Gone | None:
        """Say why the machine of a node that does not answer is certainly gone.

        None: it may be there, and come back. May block for seconds; raises nothing.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line of output. `stream` is "stdout" or "stderr"; `rank` is set in gangs; `task` is the call's name, empty
    for what was written while no call ran; `call` is a number that no other call of the pool has, and that all ranks
    of a gang share; `restart_count` says which start of the gang it was.
    """

    text: str
    stream: str
    node: int
    rank: int | None
    task: str
    call: int = 0
    restart_count: int = 0


LogSink = Callable[[LogLine], None]
