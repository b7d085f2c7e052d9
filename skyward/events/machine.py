"""Events of machines, nodes and their bootstrap."""

from __future__ import annotations

from ..core.records import dataclass
from .base import Event


@dataclass(frozen=True, kw_only=True)
class PhaseStarted(Event):
    """A node begins a phase of its bootstrap: "boot", "connect", "python", "packages", and others.

    Args:
        node: Index of the node.
        phase: Name of the phase.
        detail: More about it, such as the number of packages; may be empty.

    Example:
        >>> PhaseStarted(node=0, phase="packages", detail="torch").phase
        'packages'
    """

    node: int
    phase: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class PhaseOutput(Event):
    """One line of output of a bootstrap phase.

    Args:
        node: Index of the node.
        phase: Name of the phase.
        text: The line.

    Example:
        >>> PhaseOutput(node=0, phase="apt", text="Reading package lists...").text
        'Reading package lists...'
    """

    node: int
    phase: str
    text: str


@dataclass(frozen=True, kw_only=True)
class PhaseEnded(Event):
    """A bootstrap phase succeeded.

    Args:
        node: Index of the node.
        phase: Name of the phase.
        seconds: Time since PhaseStarted.
        was_ready: Whether there was nothing to do, because an earlier pool left the result on the machine.

    Example:
        >>> PhaseEnded(node=0, phase="packages", seconds=0.1, was_ready=True).was_ready
        True
    """

    node: int
    phase: str
    seconds: float
    was_ready: bool = False


@dataclass(frozen=True, kw_only=True)
class PhaseFailed(Event):
    """A bootstrap phase failed.

    Args:
        node: Index of the node.
        phase: Name of the phase.
        seconds: Time since PhaseStarted.
        reason: Why it failed.

    Example:
        >>> PhaseFailed(node=0, phase="packages", seconds=3.0, reason="no such package").reason
        'no such package'
    """

    node: int
    phase: str
    seconds: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class ValueRerouted(Event):
    """A value could not go straight from one node to another: another node that has it sends it, or the program does.

    The two nodes are not asked again. Check that the nodes reach each other if this costs time.

    Args:
        node: Index of the node that needs the value.
        source: Index of the node that has it.
        size_bytes: Size of the value.
        reason: Why it could not go straight.

    Example:
        >>> ValueRerouted(node=1, source=0, size_bytes=8_000_000, reason="Connection refused").source
        0
    """

    node: int
    source: int
    size_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class NodeReady(Event):
    """The agent of a node answers.

    Args:
        node: Index of the node.
        address: Address of the node; may be empty.
        devices: Accelerators that its calls share, such as "8x NVIDIA L4"; empty without any.
        limits: Numbers of calls that its kernel enforces, such as "cpus and memory_gib, by control groups of version
            2", and why not the others.

    Example:
        >>> NodeReady(node=1, address="10.0.0.7").address
        '10.0.0.7'
    """

    node: int
    address: str = ""
    devices: str = ""
    limits: str = ""


@dataclass(frozen=True, kw_only=True)
class InstanceLaunched(Event):
    """A provider created a machine. From now on it may cost money.

    Args:
        node: Index of the node that it is for.
        instance: The provider's id of the machine.
        instance_type: The provider's name of the type.
        price_usd_per_hour: Price of this machine.
        is_spot: Whether the provider may take it back.

    Example:
        >>> InstanceLaunched(
        ...     node=0, instance="i-0abc", instance_type="g5.xlarge", price_usd_per_hour=0.4, is_spot=True
        ... ).instance
        'i-0abc'
    """

    node: int
    instance: str
    instance_type: str
    price_usd_per_hour: float
    is_spot: bool


@dataclass(frozen=True, kw_only=True)
class InstanceTerminated(Event):
    """The provider confirms that a machine is gone.

    Args:
        node: Index of the node that it was for.
        instance: The provider's id of the machine.

    Example:
        >>> InstanceTerminated(node=0, instance="i-0abc").instance
        'i-0abc'
    """

    node: int
    instance: str


@dataclass(frozen=True, kw_only=True)
class LinkLost(Event):
    """The connection to a node broke or fell silent. skyward reconnects; calls on the node continue.

    Args:
        node: Index of the node.
        reason: Why; may be empty.

    Example:
        >>> LinkLost(node=2, reason="silent for 8 s").node
        2
    """

    node: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class LinkRestored(Event):
    """The connection to a node is back, and nothing was lost.

    Args:
        node: Index of the node.
        seconds: Time since LinkLost.

    Example:
        >>> LinkRestored(node=2, seconds=1.5).seconds
        1.5
    """

    node: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PreemptionNotice(Event):
    """The provider announced that it will take a node's machine back (EC2: in two minutes).

    The node gets no new calls. Running calls continue until the machine goes. Meanwhile a replacement is launched, if
    the provider has one and the pool's cost limits allow it. It takes over as soon as the old machine is idle.

    Args:
        node: Index of the node.
        notice: The provider's notice.

    Example:
        >>> PreemptionNotice(node=0, notice="terminate").notice
        'terminate'
    """

    node: int
    notice: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeLost(Event):
    """A node is gone for good, together with the calls on it.

    Args:
        node: Index of the node.
        reason: Why; may be empty.
        will_be_replaced: Whether a replacement is being created.

    Example:
        >>> NodeLost(node=1).will_be_replaced
        True
    """

    node: int
    reason: str = ""
    will_be_replaced: bool = True


@dataclass(frozen=True, kw_only=True)
class NodeReplaced(Event):
    """Another machine took the place of a lost one.

    Args:
        node: Index of the node.
        seconds: Time since NodeLost.

    Example:
        >>> NodeReplaced(node=1, seconds=64.0).seconds
        64.0
    """

    node: int
    seconds: float
