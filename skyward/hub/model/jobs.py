"""Values of jobs: the request, the states of a job's life, and the consequences of a failed attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Literal

On = Literal["one", "all"]
AfterIs = Literal["success", "any", "all"]
BLOBS = ("code", "call", "value", "error")
"""Names of a job's blobs: the user's modules, the packed call, and the packed value or exception."""
Feed = Literal["output", "items"]
"""Bytes that an attempt sends while it runs: its lines of output, or the packed items of its generator."""
FEEDS: tuple[Feed, ...] = ("output", "items")


PROTOCOL = 3
"""Version of the messages between a hub and its launchers and runners. Those of 3 know streams and sweeps over jobs."""
PROTOCOLS = (2, 3)
"""Versions that a hub understands: its own and the one before, because runners outlive an upgrade of the hub."""


class JobState(StrEnum):
    """State of a job. `TRANSITIONS` says which one may follow which."""

    QUEUED = "queued"
    RESERVED = "reserved"
    """Machines are its own. No launcher has taken it, or it waits until other jobs have left them."""
    STARTING = "starting"
    """A launcher starts its runner, which opens the pool."""
    RUNNING = "running"
    PREEMPTING = "preempting"
    """It was told to save and end, and still holds its machines."""
    LOST = "lost"
    """Its runner is gone. It holds its machines until their lease is over, because they may still write."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"

    @property
    def is_final(self) -> bool:
        return not TRANSITIONS[self] - {JobState.QUEUED}

    @property
    def has_attempt(self) -> bool:
        """True while an attempt holds machines."""
        return self in _WITH_ATTEMPT


_Q, _R, _S, _RUN = JobState.QUEUED, JobState.RESERVED, JobState.STARTING, JobState.RUNNING
_P, _L = JobState.PREEMPTING, JobState.LOST
_WITH_ATTEMPT = frozenset({_R, _S, _RUN, _P, _L})
_ENDS = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT})

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    _Q: frozenset({_R, JobState.CANCELLED, JobState.TIMED_OUT}),
    _R: frozenset({_S, _Q, JobState.CANCELLED}),
    _S: frozenset({_RUN, _P, _L, _Q}) | _ENDS,
    _RUN: frozenset({_P, _L, _Q}) | _ENDS,
    _P: frozenset({_L, _Q}) | _ENDS,
    _L: frozenset({_Q}) | _ENDS,
    # A job that is over begins again only when its user asks for it.
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset({_Q}),
    JobState.CANCELLED: frozenset({_Q}),
    JobState.TIMED_OUT: frozenset({_Q}),
}
"""State -> states that may follow it. Nothing else ever changes a job's state."""


class JobPriority(IntEnum):
    """Priority within the project. A job may lower it; only an admin may raise it above medium."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2


class AttemptEnd(StrEnum):
    """How an attempt ended. Its class decides which retries are spent; see `next_state`."""

    COMPLETED = "completed"
    FAILED = "failed"
    """The user's function raised, or its value could not be packed."""
    START_FAILED = "start_failed"
    """The pool did not open, or no runner came up."""
    NO_CAPACITY = "no_capacity"
    """The provider has no machines now. The job moves on to other machines, or waits."""
    LOST = "lost"
    """A node or the runner was lost."""
    STOPPED = "stopped"
    """It was told to end, to make way for another job or for good."""
    WITHDRAWN = "withdrawn"
    """No launcher had taken it when its job was cancelled."""


START_RETRIES = 3
"""Retries after failures of the start. They are beyond the user's power, and repeat if the machines are wrong."""
LONGEST_PAUSE_S = 300.0
"""Longest pause before a retry. It doubles from a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Request of a job: its machines and options. Plain data, which the hub keeps as JSON.

    Attributes:
        on: "one": the call runs on one node. "all": on each, and the value is the list of theirs.
        nodes: Nodes of the pool, all at once; 0 for the driver of a sweep whose trials are jobs.
        accelerator: Type of the devices; empty for any.
        devices: Devices on each node; None for whole nodes.
        vcpus: Virtual CPUs of a node, at least.
        memory_gib: Memory of a node, at least.
        region: Region; empty for any.
        labels: Labels that the machines must have.
        max_duration_s: Seconds after which an attempt is told to save and end. Reservations count on it.
        checkpoint_interval_s: Seconds between two checkpoints; its owner hears if the newest is too old.
        budget_usd: Most that all attempts may cost; None for no limit.
        is_preemptible: Whether it may be told to save and make way.
        retries: Retries after an error of the user's function.
        timeout_s: Seconds that the call may run; None for no limit.
        image: Fields of `sky.Image`.
        pool: Further options of `sky.ComputePool`.
        code_path: Folders of the user's modules for `sys.path`, relative to the unpacked code.
        code_folder: Working folder, relative to the unpacked code.
        is_stream: Whether the call is of a generator function, whose items are kept one by one.
        sweep: Number of the sweep that this job drives.
        trials: Request of each trial's job, for the driver of a sweep whose trials are jobs; None if they are calls.
        trial: Sweep and task of the trial that this job runs; None if it runs none.
        command: Program and arguments that each node runs, without a shell; empty for a call.
        operation: Name of an operation that it runs; see `model.operations`. Empty for a call or a command.
        params: Parameters of the operation.
        ranks_per_node: Processes of the command on each node.
        secrets: Names of variables whose values the launcher has for the project.
        keep_s: Seconds for which its machines wait for the next job that fits; None for those of the machine set.
        after: Ids of jobs that it waits for.
        after_is: When it may begin: "success", once all of them are completed; "any", once one is; "all", once all are
            over. If that cannot be any longer, it is cancelled.
        max_wait_s: Seconds that it may wait until it runs; None for no limit.
        cron: Cron expression in UTC: it is a schedule, which makes a job at each of these times.
        notify: Receivers of its news, with the fields of `model.notices.NoticeTarget`.
        notify_wait_s: Seconds of waiting after which they are told that it waits; None for never.
    """

    on: On = "one"
    nodes: int = 1
    accelerator: str = ""
    devices: int | None = 1
    vcpus: int = 0
    memory_gib: float = 0.0
    region: str = ""
    labels: Sequence[str] = ()
    max_duration_s: float = 86_400.0
    checkpoint_interval_s: float | None = None
    budget_usd: float | None = None
    is_preemptible: bool = False
    retries: int = 0
    timeout_s: float | None = None
    image: Mapping[str, Any] = field(default_factory=dict)
    pool: Mapping[str, Any] = field(default_factory=dict)
    code_path: Sequence[str] = ()
    code_folder: str = ""
    is_stream: bool = False
    sweep: int | None = None
    trials: Mapping[str, Any] | None = None
    trial: Mapping[str, Any] | None = None
    command: Sequence[str] = ()
    operation: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    ranks_per_node: int = 1
    secrets: Sequence[str] = ()
    keep_s: float | None = None
    after: Sequence[str] = ()
    after_is: AfterIs = "success"
    max_wait_s: float | None = None
    cron: str = ""
    notify: Sequence[Mapping[str, Any]] = ()
    notify_wait_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCounts:
    """Failed attempts of a job, counted for each budget."""

    user: int = 0
    start: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterAttempt:
    """Consequence of an attempt's end.

    Attributes:
        state: Next state of the job.
        failures: The counts, with this attempt in them.
        pause_s: Seconds before the next attempt.
    """

    state: JobState
    failures: FailureCounts
    pause_s: float = 0.0


def after_attempt(end: AttemptEnd, failures: FailureCounts, *, retries: int, ends_as: JobState | None) -> AfterAttempt:
    """Decide what follows the end of an attempt.

    An error of the user's function spends `retries`, a failed start spends `START_RETRIES`, and a loss or a preemption
    spends nothing: it comes from outside, so the job is tried again without end, with growing pauses.

    Args:
        end: How the attempt ended.
        failures: Earlier failures of the job.
        retries: Retries after an error of the user's function.
        ends_as: State in which the job was told to end, for good; None if it was not.
    """
    if end is AttemptEnd.COMPLETED:
        return AfterAttempt(state=JobState.COMPLETED, failures=failures)
    user, start, lost = failures.user, failures.start, failures.lost
    user += end is AttemptEnd.FAILED
    start += end is AttemptEnd.START_FAILED
    lost += end is AttemptEnd.LOST
    counted = FailureCounts(user=user, start=start, lost=lost)
    if ends_as is not None:
        return AfterAttempt(state=ends_as, failures=counted)
    if user > retries or start > START_RETRIES:
        return AfterAttempt(state=JobState.FAILED, failures=counted)
    spent = {AttemptEnd.FAILED: user, AttemptEnd.START_FAILED: start, AttemptEnd.LOST: lost}.get(end, 0)
    return AfterAttempt(state=JobState.QUEUED, failures=counted, pause_s=pause_s(spent))


def pause_s(failures: int) -> float:
    """Return the seconds to wait after a number of failures of one kind.

    Example:
        >>> [pause_s(failures) for failures in (0, 1, 2, 3, 60)]
        [0.0, 1.0, 2.0, 4.0, 300.0]
    """
    return min(LONGEST_PAUSE_S, 2.0 ** (min(failures, 20) - 1)) if failures else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """An attempt as its user sees it. Times are milliseconds since 1970.

    Attributes:
        number: From 1. Messages of an attempt with another number are refused.
        machines: Name of the set of machines.
        nodes: Numbers of its nodes.
        reserved_at: Time at which it got its machines.
        began_at: Time at which its pool was open; None before.
        ended_at: Its end; None while it holds machines.
        end: How it ended, see `AttemptEnd`; empty before.
        error: Why, in words.
        cost_usd: Cost of its machines.
        output_bytes: Bytes of output that arrived.
        kept_until: Time until which its machines wait for the next job; None if they do not.
        idle_cost_usd: Cost of the time for which they waited.
        pool: Name of its pool on the machine of its launcher, which `skyward ls` shows there.
    """

    number: int
    machines: str
    nodes: Sequence[int]
    reserved_at: int
    began_at: int | None = None
    ended_at: int | None = None
    end: str = ""
    error: str = ""
    cost_usd: float = 0.0
    output_bytes: int = 0
    kept_until: int | None = None
    idle_cost_usd: float = 0.0
    pool: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as its user sees it. Times are milliseconds since 1970.

    Attributes:
        why: Why it waits, or why it ended as it did; empty if there is nothing to say.
        results: Names of the results that are there: "value" or "error".
        attempts: Its attempts; empty in lists.
        saved_at: Time of its last checkpoint; None if there is none.
    """

    id: str
    name: str
    type: str
    user: str
    state: JobState
    is_held: bool
    priority: JobPriority
    spec: JobSpec
    created_at: int
    started_at: int | None
    ended_at: int | None
    why: str
    cost_usd: float
    attempt_count: int
    results: Sequence[str] = ()
    attempts: Sequence[AttemptRecord] = ()
    saved_at: int | None = None
