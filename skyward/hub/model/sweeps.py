"""Sweeps: searches for good parameters, and their trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from .names import check_text
from .refusal import Reason, Refusal

NAME_LENGTH = 500
MOST_STEPS = 10_000
"""Values of steps that one change may bring. Answers have room for two such changes, so each brings a reader on."""


class Direction(StrEnum):
    """Direction of an objective."""

    MINIMIZE = "minimize"
    MAXIMIZE = "maximize"


class TrialState(StrEnum):
    """State of a trial."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    PRUNED = "pruned"
    FAILED = "failed"

    @property
    def is_finished(self) -> bool:
        return self not in (TrialState.WAITING, TrialState.RUNNING)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a trial.

    Attributes:
        value: The value as samplers see it: the index of a choice, otherwise the number.
        distribution: Its distribution, as Optuna's JSON. The hub does not read it.
    """

    value: float
    distribution: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    """A sweep. In Optuna it is a study.

    Attributes:
        version: Number of the last change of a trial. Readers ask for the changes since a version.
        trials: Number of its trials.
        user_attrs: Attributes that users set: key -> JSON.
        system_attrs: Attributes that Optuna sets: key -> JSON.
    """

    id: int
    name: str
    owner: str
    directions: Sequence[Direction]
    created_at: int
    version: int
    trials: int
    user_attrs: Mapping[str, str]
    system_attrs: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """A trial. Times are microseconds since 1970, because Optuna keeps them so.

    Attributes:
        number: Its place in its sweep, from 0.
        values: A value for each objective of the sweep; None if there are none yet.
        changed: Version of the sweep that changed it last.
    """

    id: int
    sweep: int
    number: int
    state: TrialState
    values: Sequence[float] | None = None
    params: Mapping[str, Parameter] = field(default_factory=dict)
    user_attrs: Mapping[str, str] = field(default_factory=dict)
    system_attrs: Mapping[str, str] = field(default_factory=dict)
    started_us: int | None = None
    ended_us: int | None = None
    changed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialChange:
    """Change of a trial, all of it or nothing.

    Attributes:
        key: Id of a change of state. The same change that comes again has the same answer.
        state: New state; None: as it was.
        values: Values of the objectives; None: as they were.
        params: Parameters to set.
        user_attrs: Attributes of users to set.
        system_attrs: Attributes of Optuna to set.
        steps: Values that the trial reports: step -> value.
        started_us: Time of its start by its worker's clock; None: now.
        ended_us: Time of its end, likewise.
    """

    key: str
    state: TrialState | None = None
    values: Sequence[float] | None = None
    params: Mapping[str, Parameter] = field(default_factory=dict)
    user_attrs: Mapping[str, str] = field(default_factory=dict)
    system_attrs: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[int, float] = field(default_factory=dict)
    started_us: int | None = None
    ended_us: int | None = None


@dataclass(frozen=True, slots=True)
class TrialStep:
    """A value that a trial reported."""

    trial: int
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class TrialChanges:
    """Trials and steps that changed since a version.

    Attributes:
        version: The version up to which these are all changes.
        is_complete: Whether it is the sweep's version. Otherwise there are more.
    """

    version: int
    is_complete: bool
    trials: Sequence[TrialRecord]
    steps: Sequence[TrialStep]


def check_sweep_name(name: str) -> str:
    """Check the name of a sweep. Optuna allows an empty one."""
    check_text("name", name)
    if len(name) > NAME_LENGTH:
        raise Refusal(Reason.INVALID, f"name: is longer than {NAME_LENGTH} characters; shorten it", field="name")
    return name


def check_change(change: TrialChange) -> TrialChange:
    """Check a change of a trial."""
    for texts in (change.params, change.user_attrs, change.system_attrs):
        for key in texts:
            check_text("key", key)
    if len(change.steps) > MOST_STEPS:
        raise Refusal(
            Reason.INVALID,
            f"steps: {len(change.steps)} values, and a change takes {MOST_STEPS}; send them in parts",
            field="steps",
        )
    return change
