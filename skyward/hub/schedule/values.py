"""Values of the scheduler: what there is, what waits, what runs, and what was decided.

Times are seconds since 1970, durations are seconds, money is USD.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .reasons import WaitReason

_FOREVER = math.inf
_NOTHING: Mapping[str, float] = {}


class SetKind(StrEnum):
    """Kind of a set of machines: who has them, and how they are counted."""

    FIXED = "fixed"
    """Machines that are there, such as SSH hosts. They are counted."""
    ELASTIC = "elastic"
    """Machines that are rented for a job, up to a number and a price by the hour."""
    EXTERNAL = "external"
    """Machines behind a queue of its own: the whole gang is asked for, and the provider says why it waits."""


class Priority(IntEnum):
    """Priority of a job within its project. A job may lower it; only an admin may raise it."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2


class PolicyName(StrEnum):
    """Order in which projects take their turns."""

    FIFO = "fifo"
    """Jobs in their order, whatever their project and priority."""
    PRIORITY = "priority"
    """Priority first, whatever the project; then order."""
    FAIR_SHARE = "fair_share"
    """The project with the lowest share first; within it, priority and then order."""


class AttemptState(StrEnum):
    """State of an attempt that holds machines."""

    RESERVED = "reserved"
    """The machines are its own, but some wait for a victim to save and end."""
    STARTING = "starting"
    RUNNING = "running"
    PREEMPTING = "preempting"
    """It was told to save and end, and still holds its machines."""


class EndCause(StrEnum):
    """Cause for which the scheduler ends an attempt, after a save."""

    TIME = "timed_out"
    BUDGET = "budget"
    QUOTA_MONEY = "quota_money"
    """The money of its project or its user for the day or the month."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Machines that a job needs, all at once.

    Args:
        nodes: Nodes of the gang; 0 for a job that needs a launcher of such machines, and none of them.
        devices: Devices on each node, from 1; None for whole nodes, whatever they have.
        accelerator: Type of the devices, such as `"A100"`; empty for any.
        vcpus: Virtual processors of a node, at least.
        memory_gib: Memory of a node, at least, in GiB.
        region: Region; empty for any.
        labels: Labels that the set must have.
    """

    nodes: int = 1
    devices: int | None = 1
    accelerator: str = ""
    vcpus: int = 0
    memory_gib: float = 0.0
    region: str = ""
    labels: frozenset[str] = frozenset()

    def on_each(self, machines: MachineSet) -> int:
        """Devices that the job takes on each of its nodes of `machines`."""
        return machines.devices if self.devices is None else self.devices

    def in_words(self) -> str:
        """Return the need as it stands in a sentence.

        Example:
            >>> Shape(nodes=2, devices=4, accelerator="A100").in_words()
            '8 A100 on 2 nodes'
        """
        if not self.nodes:
            return f"a launcher of machines with {self.accelerator}" if self.accelerator else "a launcher"
        nodes = f"{self.nodes} node{'s' * (self.nodes != 1)}"
        if self.devices is None:
            return f"{nodes} with {self.accelerator}" if self.accelerator else nodes
        count = self.devices * self.nodes
        name = self.accelerator or f"device{'s' * (count != 1)}"
        return f"{count} {name}" + (f" on {nodes}" if self.nodes > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSet:
    """A named set of equal machines.

    Args:
        name: Name of the set.
        kind: How its machines are counted.
        nodes: Most nodes that it has, or may have at once.
        devices: Devices of a node; 1 for a node without accelerators, which is then given as a whole.
        accelerator: Type of its devices; empty if it has none.
        vcpus: Virtual processors of a node.
        memory_gib: Memory of a node.
        region: Region.
        labels: Labels that jobs may ask for.
        usd_per_hour: Price of a node.
        max_usd_per_hour: Most that all its nodes may cost together.
        projects: Projects that may use it; None for all.
        is_draining: Running jobs end, and none begin.
        down: Numbers of nodes that cannot be used now.
        warm: Node -> the image and project that its idle machine is kept for.
        full_until: Time until which the provider is known to have no machines.
        older_until: Time until which its launchers are taken for too old for jobs that need a newer one.
    """

    name: str
    kind: SetKind = SetKind.FIXED
    nodes: int
    devices: int = 1
    accelerator: str = ""
    vcpus: int = 0
    memory_gib: float = 0.0
    region: str = ""
    labels: frozenset[str] = frozenset()
    usd_per_hour: float = 0.0
    max_usd_per_hour: float = _FOREVER
    projects: frozenset[str] | None = None
    is_draining: bool = False
    down: frozenset[int] = frozenset()
    warm: Mapping[int, str] = field(default_factory=dict)
    full_until: float = 0.0
    older_until: float = 0.0

    @property
    def most_nodes(self) -> int:
        """Most nodes in use at once: their number, or what the price by the hour allows."""
        if not self.usd_per_hour or self.max_usd_per_hour == _FOREVER:
            return self.nodes
        return min(self.nodes, int(self.max_usd_per_hour / self.usd_per_hour + 1e-9))

    @property
    def device_kind(self) -> str:
        """Kind of device that quotas and shares count: the accelerator, or `"node"`."""
        return self.accelerator or "node"

    def suits(self, shape: Shape, project: str) -> bool:
        """Return whether the set could run such a job of `project` if all of its machines were free."""
        return (self.projects is None or project in self.projects) and self.fits(shape)

    def fits(self, shape: Shape) -> bool:
        """Return whether the set could run such a job of some project if all of its machines were free."""
        return (
            shape.nodes <= self.most_nodes
            and shape.on_each(self) <= self.devices
            and shape.accelerator in ("", self.accelerator)
            and shape.region in ("", self.region)
            and shape.vcpus <= self.vcpus
            and shape.memory_gib <= self.memory_gib
            and shape.labels <= self.labels
        )


def with_newer_launchers(sets: Iterable[MachineSet], now: float) -> list[MachineSet]:
    """Return the sets that begin jobs, and whose launchers are not known to be too old for some of them.

    Example:
        >>> old = MachineSet(name="old", nodes=1, older_until=60.0)
        >>> [one.name for one in with_newer_launchers([old, MachineSet(name="new", nodes=1)], now=0.0)]
        ['new']
    """
    return [machines for machines in sets if not machines.is_draining and machines.older_until <= now]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubJob:
    """A job that waits, or that an attempt runs.

    Args:
        id: Its id.
        project: Project that it is charged to.
        user: User who handed it in.
        order: Its place among jobs of equal rank: the lowest first. A preempted job gets one ahead of its queue.
        shape: Machines that it needs.
        max_duration_s: Time after which it is ended. Reservations count on it.
        priority: Priority within the project.
        is_preemptible: It may be told to save and make way.
        warm: Image and project that a kept machine must have to be reused.
        needs_newer: It needs a launcher of the newest version.
        budget_usd: Most that the job may cost.
        spent_usd: Cost so far.
    """

    id: str
    project: str
    user: str = ""
    order: int
    shape: Shape = Shape()
    max_duration_s: float
    priority: Priority = Priority.MEDIUM
    is_preemptible: bool = False
    warm: str = ""
    needs_newer: bool = False
    budget_usd: float = _FOREVER
    spent_usd: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAttempt:
    """An attempt that holds machines.

    Args:
        job: Its job.
        machines: Name of its set.
        nodes: Numbers of its nodes.
        state: Its state.
        began_at: Time at which it got its machines.
        saved_at: Time of its last checkpoint; its beginning if there is none.
        ends_by: Latest end of its grace while it makes way; otherwise infinite.
        on_loan: It passed a job that waits, on machines reserved for that one, and must make way for it.
        waits_for: Ids of the jobs that must end before it may begin.
    """

    job: HubJob
    machines: str
    nodes: tuple[int, ...]
    state: AttemptState = AttemptState.RUNNING
    began_at: float
    saved_at: float = 0.0
    ends_by: float = _FOREVER
    on_loan: bool = False
    waits_for: frozenset[str] = frozenset()

    @property
    def leaves_at(self) -> float:
        """Time at which its machines are free at the latest."""
        return min(self.ends_by, self.began_at + self.job.max_duration_s)

    def lost_s(self, now: float) -> float:
        """Work that it would lose if it ended now: the time since its last checkpoint."""
        return now - max(self.saved_at, self.began_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuota:
    """Limits of a project or of a user. None of them limits anything unless it is given.

    Args:
        devices: Kind of device -> devices that are its own. More may be borrowed while they are idle.
        may_borrow: It may use more devices than its own.
        nodes: Most nodes at once.
        jobs: Most jobs that run at once.
        usd_per_day: Most that its jobs may cost in a day.
        usd_per_month: Most that its jobs may cost in a month.
    """

    devices: Mapping[str, int] = field(default_factory=dict)
    may_borrow: bool = True
    nodes: int | None = None
    jobs: int | None = None
    usd_per_day: float = _FOREVER
    usd_per_month: float = _FOREVER


@dataclass(frozen=True, slots=True, kw_only=True)
class UserState:
    """A user as the scheduler sees it.

    Args:
        name: Its name.
        quota: Its limits.
        spent_today_usd: Cost of its jobs today.
        spent_month_usd: Cost of its jobs this month.
    """

    name: str
    quota: JobQuota = JobQuota()
    spent_today_usd: float = 0.0
    spent_month_usd: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectState(UserState):
    """A project as the scheduler sees it.

    Args:
        name: Its name.
        quota: Its limits.
        spent_today_usd: Cost of its jobs today.
        spent_month_usd: Cost of its jobs this month.
        weight: Its part of the machines, beside the others' weights.
        used: Kind of device -> device-seconds that it used, decayed to now (`shares.decayed`).
    """

    weight: float = 1.0
    used: Mapping[str, float] = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Rules of a hub's scheduler.

    Args:
        name: Order of the jobs.
        half_life_s: Time after which use counts half in the shares.
        grace_s: Time that a victim has to save and end.
        stranded: Part of a set's devices that may be stranded before it is reported.
    """

    name: PolicyName = PolicyName.FAIR_SHARE
    half_life_s: float = 7 * 86_400.0
    grace_s: float = 300.0
    stranded: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsSnapshot:
    """All that a decision depends on.

    Args:
        machines: Sets of machines.
        projects: Projects; one that is not listed has no limits and a weight of 1.
        users: Users; one that is not listed has no limits.
        waiting: Jobs that may begin now: held, dependent and later ones are left out.
        attempts: Attempts that hold machines.
        reserved: Ids of the jobs with a reservation from the decision before. They keep their turn, because shares
            change with each job that begins, and machines that drain for a gang would go to somebody else's.
        policy: Rules.
    """

    machines: tuple[MachineSet, ...]
    projects: tuple[ProjectState, ...] = ()
    users: tuple[UserState, ...] = ()
    waiting: tuple[HubJob, ...] = ()
    attempts: tuple[JobAttempt, ...] = ()
    reserved: frozenset[str] = frozenset()
    policy: Policy = Policy()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlacement:
    """Decision: a waiting job gets these machines.

    Args:
        job: The job.
        machines: Name of the set.
        nodes: Numbers of its nodes.
        victims: Ids of the running jobs that must save and end first.
        on_loan: The machines are reserved for another job, which may take them back.
    """

    job: str
    machines: str
    nodes: tuple[int, ...]
    victims: tuple[str, ...] = ()
    on_loan: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Decision: no job may delay this one on these machines.

    Args:
        job: The job at the head, which does not fit yet.
        machines: Name of the set.
        nodes: Numbers of the nodes that will be free first.
        at: Time at which they are free at the latest.
    """

    job: str
    machines: str
    nodes: tuple[int, ...]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Decision: an attempt must save and end."""

    job: str
    cause: EndCause


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranded:
    """Alert: devices of a set are idle although a job waits for as many, because they lie on too many nodes."""

    machines: str
    devices: int
    part: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """Everything that was decided at one moment.

    Args:
        placements: Jobs that get machines, in the order in which they were chosen.
        reservations: Reservations: for each set at most two of large gangs, and one of another job.
        ends: Attempts that must end.
        waiting: Id of each job that still waits -> why.
        stranded: Sets with too many stranded devices.
    """

    placements: tuple[JobPlacement, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    ends: tuple[End, ...] = ()
    waiting: Mapping[str, WaitReason] = field(default_factory=dict)
    stranded: tuple[Stranded, ...] = ()
