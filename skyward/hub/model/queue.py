"""Values of the queue: jobs in their order, and the devices that they hold or will hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .capacity import MachineSetSpec
from .jobs import JobRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """A job that is not over.

    Attributes:
        needs: Machines that it needs, in words.
        place: Its place among the waiting jobs of all projects, from 1. None: it holds machines, or may not begin yet.
        starts_by: Time in milliseconds since 1970 by which its reservation begins; None without a reservation.
    """

    record: JobRecord
    needs: str
    place: int | None = None
    starts_by: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpan:
    """Devices that one job holds, or has reserved, for a time. Times are milliseconds since 1970.

    Attributes:
        job: Id of the job; empty for a job of another project.
        name: Its name; empty likewise.
        state: State of the job, or "reservation".
        nodes: Numbers of the nodes.
        devices: Numbers of its devices on each of these nodes; empty if they have none.
        each: Number of its devices on each node.
        begins_at: Time since which, or from which on, the devices are its own.
        ends_by: Time by which it leaves them.
        on_loan: Whether they are reserved for another job, for which it makes way.
    """

    job: str
    name: str
    state: str
    nodes: Sequence[int]
    devices: Sequence[int]
    each: int
    begins_at: int
    ends_by: int
    on_loan: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPlan:
    """A machine set with its devices in use.

    Attributes:
        stranded: Idle devices that a waiting job could use if they were on fewer nodes.
        spans: Devices in use, and reservations.
    """

    spec: MachineSetSpec
    is_draining: bool
    full_until: int
    stranded: int
    spans: Sequence[DeviceSpan]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlan:
    """The queue as a project sees it.

    Attributes:
        at: Time at which it was so.
        waiting: Waiting jobs of all projects.
        jobs: Jobs of the project that are not over: those with machines first, then the others in their order.
        has_more: Whether there are more of them than were asked for.
    """

    at: int
    waiting: int
    jobs: Sequence[QueuedJob]
    has_more: bool
    sets: Sequence[SetPlan]
