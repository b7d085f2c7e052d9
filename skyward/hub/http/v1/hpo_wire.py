"""Requests and answers about sweeps that skyward runs. Their trials are in `sweep_wire` too, as Optuna has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from .sweep_wire import DirectionName, Key, Number, StateName
from .wire import Name

SearchStatus = Literal["queued", "running", "interrupted", "completed", "stopped", "failed"]


class SearchesQuery(Struct):
    """Sweeps with an id below `before`, the newest first."""

    before: Annotated[int, Meta(ge=0)] | None = None
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100
    project: str | None = None


class NewSearch(Struct, forbid_unknown_fields=True):
    """A sweep. `config` is as in YAML. A job with its number as `sweep` runs it, or a program that takes the lease.

    A sweep of that name with the same search goes on: its trials are kept, and its limits become those given here.
    """

    name: Name
    key: Key
    config: dict[str, Any]


class TrialResultOut(Struct):
    """A trial with its parameters as values. Times are microseconds since 1970.

    `run` is the id of its run; `error` tells why it failed, and `stopped_by` what ended it early: "pruned", "patience"
    or "stopped".
    """

    id: int
    number: int
    state: StateName
    values: list[Number] | None
    params: dict[str, Any]
    run: str | None
    error: str | None
    stopped_by: str | None
    started_us: int | None
    ended_us: int | None


class TrialsAfter(Struct):
    """Trials behind the number `after`, in their order."""

    after: Annotated[int, Meta(ge=-1)] = -1
    limit: Annotated[int, Meta(ge=1, le=2_000)] = 1_000
    project: str | None = None


class TrialResultsOut(Struct):
    trials: list[TrialResultOut]


class SearchOut(Struct):
    """A sweep with its configuration and progress.

    `counts` has the number of trials in each state. `best` is the best completed trial, null with several objectives.
    `run` is the id of its run, whose children are the runs of its trials. Times are milliseconds since 1970.
    """

    id: int
    name: str
    owner: str
    status: SearchStatus
    created_at: int
    version: int
    directions: list[DirectionName]
    metrics: list[str]
    config: dict[str, Any]
    trials: int
    counts: dict[str, int]
    best: TrialResultOut | None
    run: str | None
    job: str | None


class SearchesOut(Struct):
    sweeps: list[SearchOut]


class LeaseIn(Struct):
    """Lease of `driver`, a name that no other program has. Zero milliseconds end it, and with `state` the sweep."""

    driver: Key
    lasts_ms: Annotated[int, Meta(ge=0, le=600_000)] = 0
    state: Literal["completed", "stopped", "failed"] | None = None


class LeaseOut(Struct):
    """State of a lease: the driver may have it or not, and the sweep may be told to stop.

    `fence` grows with each change of the driver.
    """

    is_held: bool
    fence: int
    is_stopping: bool
