"""Requests and answers of `/v1` about jobs, their runners, and machines. Times are milliseconds since 1970."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

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
KeepSeconds = Annotated[float, Meta(ge=0, le=86_400)]


class JobSpecWire(Struct, forbid_unknown_fields=True):
    """Request of a job; see `skyward.hub.model.jobs.JobSpec`."""

    on: Literal["one", "all"] = "one"
    nodes: Annotated[int, Meta(ge=0, le=100_000)] = 1
    accelerator: str = ""
    devices: Count | None = 1
    vcpus: Annotated[int, Meta(ge=0)] = 0
    memory_gib: Amount = 0.0
    region: str = ""
    labels: list[str] = []
    max_duration_s: Seconds = 86_400.0
    checkpoint_interval_s: Seconds | None = None
    budget_usd: Amount | None = None
    is_preemptible: bool = False
    retries: Annotated[int, Meta(ge=0, le=1000)] = 0
    timeout_s: Seconds | None = None
    image: dict[str, Any] = {}
    pool: dict[str, Any] = {}
    code_path: list[str] = []
    code_folder: str = ""
    is_stream: bool = False
    sweep: int | None = None
    trials: dict[str, Any] | None = None
    trial: dict[str, Any] | None = None
    command: list[str] = []
    operation: str = ""
    params: dict[str, Any] = {}
    ranks_per_node: Count = 1
    secrets: list[str] = []
    keep_s: KeepSeconds | None = None
    after: Annotated[list[str], Meta(max_length=1000)] = []
    after_is: Literal["success", "any", "all"] = "success"
    max_wait_s: Seconds | None = None
    cron: str = ""
    notify: Annotated[list[dict[str, Any]], Meta(max_length=8)] = []
    notify_wait_s: Seconds | None = None


class ResourcesIn(Struct, forbid_unknown_fields=True):
    """Machines of a command. Without `gpus` and `gpu_type` it gets whole nodes of any kind."""

    gpus: Annotated[int, Meta(ge=0, le=1000)] | None = None
    gpu_type: str = ""
    memory_gib: Amount = 0.0
    cpu: Amount = 0.0


class DistributedIn(Struct, forbid_unknown_fields=True):
    """Nodes of a command, always all or none, and the processes on them."""

    strategy: Literal["ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3"] | None = None
    num_nodes: Count = 1
    gpus_per_node: Annotated[int, Meta(ge=1, le=1000)] | None = None
    backend: str = ""
    gang_scheduling: Literal[True] = True
    rdma: Literal["auto", "enabled", "disabled"] = "auto"
    sharding: str = ""


class StorageIn(Struct, forbid_unknown_fields=True):
    """Places that a command finds in SKYWARD_DATASETS and SKYWARD_CHECKPOINT_DIR."""

    datasets: str = ""
    checkpoints: str = ""


class ScheduleIn(Struct, forbid_unknown_fields=True):
    max_duration_s: Seconds | None = None
    checkpoint_interval_s: Seconds | None = None
    preemptible: bool = False
    keep_s: KeepSeconds | None = None
    after: Annotated[list[str], Meta(max_length=1000)] = []
    after_is: Literal["success", "any", "all"] = "success"
    max_wait_s: Seconds | None = None
    cron: str = ""


class NewJobIn(Struct, forbid_unknown_fields=True):
    """A job to be made: a call with `spec`, or a `command` or an `operation` with the fields of a job's YAML.

    `blobs` are hashes of its code and its packed call, which were uploaded before. With a `key` that a job of the
    project has, the answer is that job.
    """

    name: Name
    spec: JobSpecWire | None = None
    command: list[str] = []
    operation: str = ""
    params: dict[str, Any] = {}
    image: str | dict[str, Any] = ""
    env: dict[str, str] = {}
    secrets: list[str] = []
    resources: ResourcesIn = field(default_factory=ResourcesIn)
    distributed: DistributedIn = field(default_factory=DistributedIn)
    storage: StorageIn = field(default_factory=StorageIn)
    schedule: ScheduleIn = field(default_factory=ScheduleIn)
    region: str = ""
    labels: list[str] = []
    retries: Annotated[int, Meta(ge=0, le=1000)] = 0
    budget_usd: Amount | None = None
    notify: Annotated[list[dict[str, Any]], Meta(max_length=8)] = []
    notify_wait_s: Seconds | None = None
    code_path: list[str] = []
    code_folder: str = ""
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
    kept_until: int | None = None
    idle_cost_usd: float = 0.0
    pool: str = ""


class JobOut(Struct):
    """A job. `why` says why it waits or how it ended; `results` are "value" or "error", where they are there.

    `saved_at` is the time of its last checkpoint in milliseconds since 1970.
    """

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
    saved_at: int | None = None


class JobsOut(Struct):
    jobs: list[JobOut]
    next_page_token: str | None = None


class JobsQuery(Struct):
    """Part of the jobs of a project, the newest first.

    With `sweep`, those that are trials of that sweep. With `trials=false`, none that is a trial.
    """

    status: list[JobStateName] = []
    sweep: int | None = None
    trials: bool = True
    limit: Limit = 100
    page_token: str | None = None
    project: str | None = None


class FeedQuery(Struct):
    """Bytes from `start` of an attempt on; by default from the first byte of the first one."""

    attempt: Count | None = None
    start: Annotated[int, Meta(ge=0)] = 0
    follow: bool = True
    project: str | None = None


# Runners --------------------------------------------------------------------------------------------------------------


class SaveNote(Struct):
    """A durable save of a training, counted from 1, and its age."""

    number: Annotated[int, Meta(ge=1)]
    path: Annotated[str, Meta(max_length=1000)]
    step: int | None = None
    bytes: Annotated[int, Meta(ge=0)] = 0
    seconds: Amount = 0.0
    age_s: Amount = 0.0


class GpuSample(Struct):
    """Load of a GPU of an attempt: `node` counts its nodes from 0, and `gpu` the GPUs of that machine."""

    node: Annotated[int, Meta(ge=0)]
    gpu: Annotated[int, Meta(ge=0)]
    busy: Annotated[float, Meta(ge=0, le=1)]
    memory_used_gib: Amount = 0.0
    memory_gib: Amount = 0.0
    celsius: Amount = 0.0


class Beat(Struct):
    """Sign of life of a runner, with the saves that the hub may lack, and now and then the load of its GPUs."""

    is_running: bool
    cost_usd: Amount = 0.0
    saved_at: int | None = None
    note: Annotated[str, Meta(max_length=1000)] = ""
    protocol: int = 1
    saves: Annotated[list[SaveNote], Meta(max_length=100)] = []
    gpus: Annotated[list[GpuSample], Meta(max_length=1024)] = []


class OrderOut(Struct):
    """Command to a runner: "save", "stop", "abort" or none, with its number and the seconds that it has.

    `now` is the time of the hub in milliseconds since 1970.
    """

    command: str
    number: int
    grace_s: float
    now: int = 0


class FeedSize(Struct):
    """Bytes that the hub has."""

    size: int


class AttemptEndIn(Struct):
    """End of an attempt.

    With `keeps`, its runner waits with the machines for the next one. `may_retry` says whether the job's retries count
    for an error of its function.
    """

    end: EndName
    error: str = ""
    cost_usd: Amount = 0.0
    keeps: bool = False
    may_retry: bool = True


class NewTrialJob(Struct, forbid_unknown_fields=True):
    """Trial that a job shall run, with the fields of `skyward.hub.client.trial.TrialTask`."""

    number: Annotated[int, Meta(ge=0)]
    task: dict[str, Any]


class TrialJobsOut(Struct):
    """Ids of the jobs of a sweep's trials that are not over."""

    jobs: list[str]


class NextIn(Struct):
    """Question of a runner that waits."""

    idle_cost_usd: Amount = 0.0
    wait_s: Annotated[float, Meta(ge=0, le=30)] = 0.0


class LauncherPoll(Struct):
    """Runners of a launcher, as job and attempt: all that it has started, and those whose process is gone.

    It serves `machines` and all sets of `providers`; without both, all sets. `last_lines` has the end of the log of
    each one of `gone`, in the same order.
    """

    machines: list[str] = []
    providers: list[str] = []
    known: list[tuple[str, int]] = []
    gone: list[tuple[str, int]] = []
    last_lines: list[str] = []
    wait_s: Annotated[float, Meta(ge=0, le=30)] = 0.0
    protocol: int = 1


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
    keep_s: KeepSeconds = 0.0


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
    keep_s: float = 0.0
    code: str = ""


class NextOut(Struct):
    """Next attempt of a runner that waits, or the order to end. Neither: it asks again."""

    launch: LaunchOut | None = None
    is_over: bool = False


class LauncherOrdersOut(Struct):
    start: list[LaunchOut]
    kill: list[tuple[str, int]]
    forget: list[tuple[str, int]]


# Capacity -------------------------------------------------------------------------------------------------------------


class MachineSetOut(Struct):
    """A machine set and its use. `jobs` are those of the project that asks.

    `stranded_devices` are idle, and a waiting job could use them if they were on fewer nodes. `usd_per_hour` is the
    price of the nodes that are there now, and `idle_usd_per_hour` that of those without a job.
    `kept_nodes` wait for the next job, and `kept_cost_usd` is what they have cost meanwhile.
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
    kept_nodes: int = 0
    kept_cost_usd: float = 0.0


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
