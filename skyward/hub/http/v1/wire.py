"""Requests and answers of `/v1`. Times are milliseconds since 1970."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

View = Literal["active", "deleted", "all"]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Most = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Limit = Annotated[int, Meta(ge=1, le=50_000)]
Name = Annotated[str, Meta(min_length=1)]
Status = Literal["queued", "running", "completed", "failed", "cancelled"]
RoleName = Literal["viewer", "researcher", "admin"]
Tags = dict[str, str]


class ExperimentOut(Struct):
    """A named group of runs."""

    id: str
    name: str
    project: str
    lifecycle: str
    created_at: int
    updated_at: int
    tags: Tags


class ExperimentsOut(Struct):
    experiments: list[ExperimentOut]
    next_page_token: str | None = None


class NewExperiment(Struct):
    name: Name
    tags: Tags = {}


class ExperimentChange(Struct):
    """Changes of an experiment. A tag of null is deleted."""

    name: Name | None = None
    tags: dict[str, str | None] = {}


class Search(Struct):
    """Part of a list, by the search grammar of MLflow."""

    filter: str = ""
    order_by: list[str] = []
    view: View = "active"
    limit: Limit = 100
    page_token: str | None = None
    project: str | None = None


class RunSearch(Struct):
    """Part of the runs of a project, or of some of its experiments."""

    experiment_id: list[str] = []
    filter: str = ""
    order_by: list[str] = []
    view: View = "active"
    limit: Limit = 100
    page_token: str | None = None
    project: str | None = None


class Metric(Struct):
    key: str
    value: float | str
    step: int
    timestamp: int


class ArtifactOut(Struct):
    key: str
    path: str
    size: int
    sha256: str
    is_directory: bool = False


class DatasetOut(Struct):
    name: str
    digest: str
    source_type: str
    source: str
    schema: str | None = None
    profile: str | None = None
    tags: Tags = {}


class RunOut(Struct):
    """A run, with the latest value of each metric."""

    id: str
    experiment_id: str
    experiment: str
    project: str
    organization: str
    name: str
    status: str
    lifecycle: str
    user_id: str
    start_time: int
    end_time: int | None
    heartbeat_at: int | None
    error: str | None
    params: Tags
    tags: Tags
    metrics: list[Metric]
    artifacts: list[ArtifactOut]
    system_metrics: dict[str, float | str]
    inputs: list[DatasetOut] = []


class RunsOut(Struct):
    runs: list[RunOut]
    next_page_token: str | None = None


class NewRun(Struct):
    """A run to be made. `experiment` is a name and makes the experiment where it is missing."""

    experiment_id: str | None = None
    experiment: str | None = None
    id: str | None = None
    name: str | None = None
    start_time: Int64 | None = None
    params: dict[str, Any] = {}
    tags: Tags = {}


class RunChange(Struct):
    name: Name | None = None
    status: Status | None = None
    end_time: Int64 | None = None
    error: str | None = None


class StatusChange(Struct):
    status: Status
    end_time: Int64 | None = None
    error: str | None = None


class NewMetric(Struct):
    key: Name
    value: float
    step: int = 0
    timestamp: int | None = None


class NewMetrics(Struct):
    metrics: list[NewMetric]


class NewParams(Struct):
    params: dict[str, Any]


class NewTags(Struct):
    """Tags to be set. One of null is deleted."""

    tags: dict[str, str | None]


class Compare(Struct):
    """Runs to be compared, and metrics by commas. Without metrics: all."""

    run: list[str]
    metrics: str = ""
    project: str | None = None


class ComparisonOut(Struct):
    """Runs, and by name the parameters and metrics in which they differ or not."""

    runs: list[RunOut]
    params: dict[str, list[str | None]]
    metrics: dict[str, list[float | str | None]]
    different_params: list[str]


class PointsQuery(Struct):
    """Part of a metric's history. `at_most` thins it to about this number of points."""

    key: Name
    start: Int64 | None = None
    end: Int64 | None = None
    at_most: Int64 | None = None
    project: str | None = None


class Points(Struct):
    key: str
    steps: list[int]
    timestamps: list[int]
    values: list[float | str]


class ArtifactQuery(Struct):
    prefix: str = ""
    project: str | None = None


class DownloadQuery(Struct):
    redirect: bool = False
    project: str | None = None


class ArtifactsOut(Struct):
    artifacts: list[ArtifactOut]


class BatchIn(Struct):
    """Records of a client, numbered from `first`."""

    client: Annotated[str, Meta(min_length=1, max_length=64)]
    first: Annotated[int, Meta(ge=0)]
    records: list[list[Any]]


class CollectedCommand(Struct):
    number: int
    action: str


class RefusedRecordOut(Struct):
    """A record that can never be accepted. It counts as accepted."""

    number: int
    message: str


class BatchOut(Struct):
    """Number of the last record that is safe, and commands that wait for the run."""

    accepted: int
    state: str
    commands: list[CollectedCommand]
    refused: list[RefusedRecordOut] = []


class NewCommand(Struct):
    action: Literal["save", "stop", "abort"]


class CommandOut(Struct):
    number: int
    action: str
    created_at: int
    acknowledged_at: int | None
    result: str | None


class Commands(Struct):
    commands: list[CommandOut]


class BlobOut(Struct):
    sha256: str
    size: int


class EventsQuery(Struct):
    """Events of a project, or of one run or experiment. `kind` chooses some, such as "job" or "points"; none: all."""

    run: str | None = None
    experiment: str | None = None
    kind: list[str] = []
    project: str | None = None


class Nothing(Struct):
    """No fields, or `project`."""

    project: str | None = None


class Done(Struct):
    """Answer `{}`."""


class Me(Struct):
    user: str
    role: str
    project: str
    organization: str
    authentication: bool


class SignIn(Struct):
    code: str


class ProjectOut(Struct):
    name: str
    created_at: int


class Projects(Struct):
    projects: list[ProjectOut]


class NewProject(Struct):
    name: Name


class MemberOut(Struct):
    user: str
    kind: str
    role: str
    created_at: int


class Members(Struct):
    members: list[MemberOut]


class NewMember(Struct):
    user: Name
    role: RoleName


class User(Struct):
    name: str
    kind: str
    is_owner: bool
    created_at: int
    disabled_at: int | None


class UsersOut(Struct):
    users: list[User]


class NewUser(Struct):
    name: Name
    is_service: bool = False
    is_owner: bool = False


class SignInLink(Struct):
    """One-time link of a user. Null for service accounts."""

    user: str
    link: str | None


class TokenOut(Struct):
    id: str
    user: str
    name: str
    kind: str
    project: str | None
    role: str | None
    run: str | None
    created_at: int
    expires_at: int | None
    used_at: int | None


class LimitOut(Struct):
    """A limit of a project and its use. `most` of null means that there is no limit."""

    name: str
    most: int | None
    used: int


class Limits(Struct):
    limits: list[LimitOut]


class NewLimits(Struct):
    """New limits of a project. A limit of null is removed; one that is left out stays as it is."""

    runs: Most | UnsetType | None = UNSET
    artifact_bytes: Most | UnsetType | None = UNSET


class TokensQuery(Struct):
    everybody: bool = False
    project: str | None = None


class Tokens(Struct):
    tokens: list[TokenOut]


class TokenIn(Struct):
    """A token to be made. `run` makes one that writes to this run only and ends with it."""

    name: str = "token"
    user: str | None = None
    project: str | None = None
    role: RoleName | None = None
    expires_at: Int64 | None = None
    run: str | None = None


class CreatedToken(Struct):
    """A new token. Its text is shown this once."""

    id: str
    token: str


class AuditQuery(Struct):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    page_token: str | None = None
    project: str | None = None


class AuditEntry(Struct):
    id: int
    at: int
    actor: str
    token: str | None
    action: str
    resource: str
    detail: dict[str, Any]
    hash: str


class AuditPage(Struct):
    audit: list[AuditEntry]
    next_page_token: str | None = None


class StatusOut(Struct):
    """Size of the whole hub. `bytes` are those of artifacts."""

    version: str
    revision: str
    database: str
    projects: int
    experiments: int
    runs: int
    deleted_runs: int
    lost_runs: int
    points: int
    artifacts: int
    bytes: int


class Health(Struct):
    status: str
