"""Machines as values: a pool's request, a provider's offer, and the machine that an engine gets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..accelerators import Accelerator
from ..core.frozenmap import FrozenMap
from ..core.records import dataclass
from .allocation import AllocationStrategy
from .image import DEFAULT_IMAGE, Image
from .topology import Peer
from .volume import Volume

if TYPE_CHECKING:  # most processes need no SSH
    from ..ssh import SSHResult


def _nothing() -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """Request of a pool to its provider. `ComputePool` documents the fields; None means any.

    `nodes` is the number of nodes at the start, and `max_nodes` the highest number that the pool grows to (0: `nodes`).
    """

    nodes: int = 1
    max_nodes: int = 0
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
    direct_transfers: bool = True
    is_detached: bool = False
    provision_timeout_s: float = 300.0
    volumes: FrozenMap[Volume] = FrozenMap()  # immutable
    code: Any = field(default=None, compare=False, repr=False)
    """User code to send (`skyward.bootstrap.code.Code`); None if nodes read the client's files."""
    stop: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)
    """Set when nobody waits for the machines anymore. Machines that are still launching are then ended."""
    meanwhile: Callable[[], object] = field(default=_nothing, compare=False, repr=False)
    """Called once the machines start, if the launching thread would only wait for them."""

    @property
    def most_nodes(self) -> int:
        """Most nodes that the pool has at once, so that nodes on one machine can share it from the start."""
        return max(self.nodes, self.max_nodes)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Type of machine that a provider can launch now.

    Args:
        provider: Name of the provider.
        instance_type: The provider's name of the type.
        vcpus: Virtual CPUs.
        memory_gib: Memory in GiB.
        accelerator: Accelerators, or None.
        is_spot: Whether the provider may take the machine back.
        price_usd_per_hour: Price of one machine; 0 if it is not rented.
        architecture: "x86_64", "arm64", or None if it is not known.
        region: Region; may be empty.
        zone: Zone; may be empty.
        price_source: Source and date of the price.
        entry: Index of its entry in `any_of`; 0 without one.

    Example:
        >>> Offer(provider="aws", instance_type="g5.xlarge", vcpus=4, memory_gib=16, is_spot=True).is_spot
        True
    """

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
    """Source and date of the price."""
    entry: int = 0


class NodeLogin(Protocol):
    """Login on a node, as the user of its agent and with the agent's interpreter. Thread-safe."""

    def run(
        self,
        module: str,
        name: str,
        arguments: Sequence[str] = (),
        *,
        input: bytes | None = None,  # noqa: A002  # as in subprocess.run
        timeout_s: float,
        mark: str = "",
        stop: threading.Event | None = None,
    ) -> SSHResult:
        """Run a function of a module of skyward's as a program, and wait for its end.

        Args:
            module: The module, without "skyward.".
            name: The function, which returns the exit code.
            arguments: Further arguments. Everybody on the machine can read them.
            input: Standard input, which nobody else can read.
            timeout_s: Seconds until it is killed.
            mark: Name of the folder whose removal kills the process; see `bootstrap.scripts.marked`.
            stop: Another thread sets it to interrupt the program.

        Raises:
            TimeoutError: It ran longer.
            SkywardError: The machine cannot be reached.
        """
        ...

    def prepare(self, image: Image, folder: str, *, stop: threading.Event) -> tuple[str, str]:
        """Make another environment on the machine, unless it is there, and a private folder of this name.

        Returns:
            The environment's interpreter, and the path of the folder.

        Raises:
            SkywardError: It cannot be made, the machine cannot be reached, or `stop` was set.
        """
        ...

    @property
    def watchdog(self) -> int:
        """Return the process whose end is that of the node."""
        ...

    @property
    def started(self) -> str:
        """Return the start time of that process, which together with its number names it for good."""
        ...

    def channel_to(self, socket_path: str) -> tuple[str, ...]:
        """Return a command like `Machine.channel` to a socket on the node that takes descriptors as an agent's does."""
        ...

    def undo(self, mark: str) -> None:
        """Kill the processes with this mark, and remove the folder of that name. Idempotent.

        Raises:
            TimeoutError: The machine does not answer.
            SkywardError: The machine cannot be reached.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Node with a running agent. `handle` belongs to the provider; everything else is plain data.

    `socket_path` and `folder` are paths on the node. A client on the same machine connects to the socket; any other
    client runs `channel`.
    """

    node: int
    socket_path: str
    folder: str
    pid: int
    """Process id of the node's watchdog if it runs on this machine, otherwise 0."""
    peer: Peer
    slots: int
    lease_s: float
    leased_at: float = field(default=0.0, compare=False)
    """Time here (`time.monotonic`) just before its agent and lease began; 0 if this process did not start them."""
    interface: str = ""
    channel: tuple[str, ...] = ()
    """Local command whose standard input and output are a new channel to the agent; empty to use the socket.

    The command ends with its input. Its caller may kill it at any time, and run it again."""
    terminal: tuple[str, ...] = ()
    """Local command that opens a login shell on the node, on the current terminal. With one more argument, a line of
    sh, it runs that line instead. Empty if the node has no login."""
    files: tuple[str, ...] = ()
    """Local command that serves one transfer of files on the node, over its standard input and output."""
    dial: Callable[[int], socket.socket] | None = field(default=None, compare=False, repr=False)
    """Function that connects to a port on the node's loopback, from any thread. None if there is no way there."""
    login: NodeLogin | None = field(default=None, compare=False, repr=False)
    """Way to run our programs on the node; None if it is this machine."""
    offer: Offer | None = None
    """Offer that it was rented by; None if it is not rented."""
    handle: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Gone:
    """Reason why a machine certainly no longer runs. `is_preempted`: its provider took it back."""

    reason: str
    is_preempted: bool = False


PREEMPTED = Gone(reason="the provider took it back", is_preempted=True)


class Machines(Protocol):
    """Source of machines, as far as an engine needs one."""

    def replace(self, node: int) -> Machine | None:
        """Return another machine in place of a lost one; None if there will be none. May block; may raise.

        The engine may call it again if it cannot reach the machine it got. That machine is ended first.
        """
        ...

    def prepare_replacement(self, node: int) -> bool:
        """Launch the next replacement now, because the node's machine will soon be taken. May block; may raise.

        Returns False if no machine is available now; then `replace` searches again.
        """
        ...

    def give_up(self, node: int) -> None:
        """End what exists of a node that gets no replacement. May block; may raise."""
        ...

    def why_gone(self, node: int) -> Gone | None:
        """Return why the machine of a silent node is certainly gone; None if it may still exist.

        May block for seconds; raises nothing.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line of a call's output, as `ComputePool(logs=function)` receives it.

    Args:
        text: The line, without its newline.
        stream: "stdout" or "stderr".
        node: Index of the node.
        rank: Rank of a gang, or None.
        task: Name of the call; empty for output while no call ran.
        call: Number of the call, unique in the pool; all ranks of a gang share it.
        restart_count: Number of earlier starts of the gang.

    Example:
        >>> def show(line: LogLine) -> None:
        ...     print(f"[{line.node}] {line.text}")
        >>> show(LogLine(text="epoch 1", stream="stdout", node=0, rank=None, task="train"))
        [0] epoch 1
    """

    text: str
    stream: str
    node: int
    rank: int | None
    task: str
    call: int = 0
    restart_count: int = 0


LogSink = Callable[[LogLine], None]
