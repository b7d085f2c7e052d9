"""Requests and answers of `/v1` about jobs, their runners, and machines. Times are milliseconds since 1970."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from .wire import Limit, Name

JobStateName = Literal[
    "queued",
    "reserved",
    "starting",
    "running",
    "preempting",
    "lost",
    "completed",
    "failed",
    "cancelled",
    "timed_out",
]
JobType = Literal["training", "evaluation", "conversion", "other"]
PriorityName = Literal["low", "medium", "high"]
EndName = Literal["completed", "failed", "start_failed", "no_capacity", "lost", "stopped"]
Count = Annotated[int, Meta(ge=1, le=100_000)]
Amount = Annotated[float, Meta(ge=0, le=1e12)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]


class JobSpecWire(Struct, forbid_unknown_fields=True):
    """Request of a job; see `skyward.hub.model.jobs.JobSpec`."""

    on: Literal["one", "all"] = "one"
    nodes: Count = 1
    accelerator: str = ""
    devices: Count | None = 1
    vcpus: Annotated[int, Meta(ge=0)] = 0
    memory_gib: Amount = 0.0
    region: str = ""
    labels: list[str] = []
    max_duration_s: Seconds = 86_400.0
    budget_usd: Amount | None = None
    is_preemptible: bool = False
    retries: Annotated[int, Meta(ge=0, le=1000)] = 0
    timeout_s: Seconds | None = None
    image: dict[str, Any] = {}
    pool: dict[str, Any] = {}
    code_path: list[str] = []
    code_folder: str = ""
    sweep: int | None = None


class NewJobIn(Struct, forbid_unknown_fields=True):
    """A job to be made. `blobs` are hashes of its code and its packed call, which were uploaded before.

    With a `key` that a job of the project has, the answer is that job.
    """

    name: Name
    spec: JobSpecWire
    blobs: dict[str, str] = {}
    type: JobType = "other"
    priority: PriorityName = "medium"
    is_held: bool = False
    key: str | None = None


class AttemptOut(Struct):
    number: int
    machines: str
    nodes: list[int]
    reserved_at: int
    began_at: int | None
    ended_at: int | None
    end: str
    error: str
    cost_usd: float
    output_bytes: int


class JobOut(Struct):
    """A job. `why` says why it waits or how it ended; `results` are "value" or "error", where they are there."""

    id: str
    name: str
    type: str
    project: str
    user: str
    status: JobStateName
    is_held: bool
    priority: PriorityName
    spec: JobSpecWire
    created_at: int
    started_at: int | None
    ended_at: int | None
    why: str
    cost_usd: float
    attempt_count: int
    results: list[str]
    attempts: list[AttemptOut]


class JobsOut(Struct):
    jobs: list[JobOut]
    next_page_token: str | None = None


class JobsQuery(Struct):
    """Part of the jobs of a project, the newest first."""

    status: list[JobStateName] = []
    limit: Limit = 100
    page_token: str | None = None
    project: str | None = None


class OutputQuery(Struct):
    """Output from the byte `start` of an attempt on; by default from the first byte of the first one."""

    attempt: Count | None = None
    start: Annotated[int, Meta(ge=0)] = 0
    follow: bool = True
    project: str | None = None


# Runners --------------------------------------------------------------------------------------------------------------


class Beat(Struct):
    """Sign of life of a runner."""

    is_running: bool
    cost_usd: Amount = 0.0
    saved_at: int | None = None


class OrderOut(Struct):
    """Command to a runner: "save", "stop", "abort" or none, with its number and the seconds that it has."""

    command: str
    number: int
    grace_s: float


class OutputSize(Struct):
    """Bytes of output that the hub has."""

    size: int


class AttemptEndIn(Struct):
    end: EndName
    error: str = ""
    cost_usd: Amount = 0.0


class LauncherPoll(Struct):
    """Runners of a launcher, as job and attempt: all that it has started, and those whose process is gone."""

    machines: list[str] = []
    known: list[tuple[str, int]] = []
    gone: list[tuple[str, int]] = []
    wait_s: Annotated[float, Meta(ge=0, le=30)] = 0.0


class MachineSetWire(Struct, forbid_unknown_fields=True):
    """Declared machines; see `skyward.hub.model.capacity.MachineSetSpec`."""

    name: Name
    provider: dict[str, Any]
    kind: Literal["fixed", "elastic", "external"] = "fixed"
    nodes: Count = 1
    devices: Count = 1
    accelerator: str = ""
    vcpus: Annotated[int, Meta(ge=0)] = 0
    memory_gib: Amount = 0.0
    region: str = ""
    labels: list[str] = []
    usd_per_hour: Amount = 0.0
    max_usd_per_hour: Amount | None = None
    projects: list[str] | None = None


class LaunchOut(Struct):
    job: str
    attempt: int
    name: str
    project: str
    token: str
    spec: JobSpecWire
    machines: MachineSetWire
    nodes: list[int]
    devices: list[int]
    grace_s: float


class LauncherOrdersOut(Struct):
    start: list[LaunchOut]
    kill: list[tuple[str, int]]
    forget: list[tuple[str, int]]


# Capacity -------------------------------------------------------------------------------------------------------------


class MachineSetOut(Struct):
    """A machine set and its use. `jobs` are those of the project that asks.

    `stranded_devices` are idle, and a waiting job could use them if they were on fewer nodes. `usd_per_hour` is the
    price of the nodes that are there now, and `idle_usd_per_hour` that of those without a job.
    """

    name: str
    machines: MachineSetWire
    is_draining: bool
    full_until: int
    used_nodes: int
    used_devices: int
    stranded_devices: int
    usd_per_hour: float
    idle_usd_per_hour: float
    jobs: dict[str, int]


class CapacityOut(Struct):
    sets: list[MachineSetOut]


class Drain(Struct):
    is_draining: bool = True


Most = Annotated[int, Meta(ge=0, le=10**9)]


class JobQuotaWire(Struct, forbid_unknown_fields=True):
    """Limits of the jobs of a project or user; see `skyward.hub.model.quotas.JobQuotaSpec`."""

    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    devices: dict[Annotated[str, Meta(min_length=1, max_length=64)], Most] = {}
    may_borrow: bool = True
    nodes: Most | None = None
    jobs: Most | None = None
    usd_per_day: Amount | None = None
    usd_per_month: Amount | None = None


class JobQuotaOut(Struct):
    """A quota and its use now. `devices` counts by kind; money is of this day and month in UTC."""

    holder: Literal["project", "user"]
    name: str
    quota: JobQuotaWire
    devices: dict[str, int]
    nodes: int
    jobs: int
    today_usd: float
    month_usd: float


class JobQuotasOut(Struct):
    quotas: list[JobQuotaOut]
