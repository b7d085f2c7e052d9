"""Requests and answers about sweeps. Times of trials are microseconds since 1970, all others milliseconds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from .wire import Int64

Number = float | str
"""A number, or `"NaN"`, `"Infinity"` or `"-Infinity"`."""
Key = Annotated[str, Meta(min_length=1, max_length=64)]
"""Id of a request that a client makes up. The same request that comes again has the same answer."""
Attributes = dict[str, str]
"""Attributes: name -> JSON, which the hub does not read."""
StateName = Literal["waiting", "running", "completed", "pruned", "failed"]
DirectionName = Literal["minimize", "maximize"]


class SweepsQuery(Struct):
    """Sweeps in the order of their ids, those behind `after`. `name` chooses one."""

    name: str | None = None
    after: Annotated[int, Meta(ge=0)] = 0
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100
    project: str | None = None


class NewSweep(Struct):
    """A sweep with one direction for each objective."""

    name: str
    key: Key
    directions: Annotated[list[DirectionName], Meta(min_length=1, max_length=100)]


class SweepChange(Struct):
    """Attributes to set."""

    user_attrs: Attributes = {}
    system_attrs: Attributes = {}


class SweepOut(Struct):
    """A search for good parameters; in Optuna a study. `version` counts the changes of its trials."""

    id: int
    name: str
    owner: str
    directions: list[DirectionName]
    created_at: int
    version: int
    trials: int
    user_attrs: Attributes
    system_attrs: Attributes


class SweepsOut(Struct):
    sweeps: list[SweepOut]


class ParameterValue(Struct):
    """A parameter: its number, or the index of its choice, and its distribution as Optuna's JSON."""

    value: Number
    distribution: str


class TrialBody(Struct):
    """Changes of a trial. `steps` are values that it reports."""

    key: Key
    state: StateName | None = None
    values: list[Number] | None = None
    params: dict[str, ParameterValue] = {}
    user_attrs: Attributes = {}
    system_attrs: Attributes = {}
    steps: list[tuple[Int64, Number]] = []
    started_us: Int64 | None = None
    ended_us: Int64 | None = None


class NewTrial(TrialBody):
    """A new trial. `fence` is that of its driver's lease; the trial is refused if another driver has taken it."""

    fence: int | None = None


class TrialOut(Struct):
    """A trial. `number` is its place in its sweep."""

    id: int
    sweep: int
    number: int
    state: StateName
    values: list[Number] | None
    params: dict[str, ParameterValue]
    user_attrs: Attributes
    system_attrs: Attributes
    started_us: int | None
    ended_us: int | None


class TrialStepOut(Struct):
    """A value that a trial reported."""

    trial: int
    step: int
    value: Number


class TrialDetailOut(Struct):
    trial: TrialOut
    steps: list[TrialStepOut]


class TrialsQuery(Struct):
    """Trials that changed since a version of the sweep; 0: all."""

    since: Annotated[int, Meta(ge=0)] = 0
    project: str | None = None


class TrialChangesOut(Struct):
    """Changes up to `version`. If the answer is not complete, ask again with it."""

    version: int
    is_complete: bool
    trials: list[TrialOut]
    steps: list[TrialStepOut]


class TrialChanged(Struct):
    """`is_changed` is false where another worker took the waiting trial before."""

    is_changed: bool


class SilentQuery(Struct):
    """Seconds without a heartbeat after which a running trial is listed."""

    silent_s: Annotated[int, Meta(ge=1, le=2**31)]
    project: str | None = None


class SilentTrials(Struct):
    trials: list[int]
