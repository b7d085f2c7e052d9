"""Seam between the driver of a sweep and the ways to choose parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...errors import UsageError
from ..model.sweep_config import SweepConfig

STOPPED = "stopped"
"""Reason to stop a trial: its sweep was stopped, or its time is over."""


@dataclass(kw_only=True)
class TrialPlan:
    """A trial that is to run, or runs.

    Attributes:
        id: Its number in the hub.
        number: Its number in the sweep.
        params: Parameters that were chosen.
        run: Id of its run.
        attempt: From 1.
        folder: Name of its folder for checkpoints, below that of the sweep.
        load_from: Name of the folder of a checkpoint to load from.
        steps: First step and the one behind the last.
        obsolete: Names of folders of other trials that nobody needs.
        last_step: Last step that an earlier attempt reported.
        stopped_by: Reason for which it was told to stop.
    """

    id: int
    number: int
    params: Mapping[str, Any]
    run: str
    attempt: int = 1
    folder: str = ""
    load_from: str | None = None
    steps: tuple[int, int] | None = None
    obsolete: Sequence[str] = ()
    last_step: int = -1
    stopped_by: str = ""


@dataclass(frozen=True, kw_only=True)
class TrialEnd:
    """How a trial ended.

    Attributes:
        values: Value of each objective; None if it has none.
        error: Why it failed, in words; empty if it did not.
        stopped_by: Reason for which it was told to stop.
    """

    values: Sequence[float] | None = None
    error: str = ""
    stopped_by: str = ""
    reports: Mapping[int, float] = field(default_factory=dict)


def check_root(config: SweepConfig, root: str | None) -> None:
    """Check that a sweep whose trials copy checkpoints has a folder for them, which all nodes see.

    Raises:
        UsageError: It has none.
    """
    if root is None and config.strategy == "pbt":
        raise UsageError(
            "checkpoint_dir=None: members of a population copy checkpoints; pass a folder or URL that all nodes see",
            field="checkpoint_dir",
        )


class PlaceLost(Exception):
    """The driver does not hear of its trials any longer, although they go on. `error` is why."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class TrialSearch(Protocol):
    """A way to choose parameters, over the rows of a sweep. The driver calls it from one thread at a time."""

    def unfinished(self) -> Sequence[TrialPlan]:
        """Return the trials that an earlier driver began and did not end. They begin again."""
        ...

    def ask(self) -> TrialPlan | None:
        """Return the next trial; None while there is none, or when there will be none."""
        ...

    def report(self, plan: TrialPlan, step: int, value: float) -> str:
        """Take a report of a running trial, and return the reason to stop it; empty to go on."""
        ...

    def finish(self, plan: TrialPlan, end: TrialEnd) -> None:
        """Take the end of a trial."""
        ...
