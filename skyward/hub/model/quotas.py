"""Limits of a project: what it may keep, and what its jobs may use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from .refusal import Reason, Refusal


class Quota(Enum):
    """Kind of limit."""

    RUNS = "runs"
    """Runs that it keeps, those in the bin included."""
    ARTIFACT_BYTES = "artifact_bytes"
    """Bytes of its artifacts. Equal ones count once, though an upload needs room while it arrives."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit and its use.

    Attributes:
        quota: Its kind.
        most: Greatest use. None: there is no limit.
        used: Use at present. It may exceed a limit that was set later.
    """

    quota: Quota
    most: int | None
    used: int

    def check(self, more: int) -> None:
        """Check that there is room for `more`.

        Raises:
            Refusal: There is not.
        """
        if self.most is None or self.used + more <= self.most:
            return
        name = self.quota.value
        raise Refusal(
            Reason.EXHAUSTED,
            f"{name}={self.used + more}: above this project's limit of {self.most}; ask an owner to raise it, "
            "or delete something and run `skyward hub gc`",
            field=name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuotaSpec:
    """Limits of the jobs of a project or of a user, and the project's part beside the others.

    Attributes:
        weight: Part of the machines beside the weights of the other projects, above 0. A user has none.
        devices: Kind of device, or "node" -> devices that are its own. A user may never use more.
        may_borrow: The project may use more devices while they are idle, and gives them back by preemption.
        nodes: Most nodes at once; None for no limit.
        jobs: Most jobs that run at once; None for no limit.
        usd_per_day: Most that its jobs may cost in a day of UTC; None for no limit.
        usd_per_month: Most that its jobs may cost in a month of UTC; None for no limit.
    """

    weight: float = 1.0
    devices: Mapping[str, int] = field(default_factory=dict)
    may_borrow: bool = True
    nodes: int | None = None
    jobs: int | None = None
    usd_per_day: float | None = None
    usd_per_month: float | None = None


HolderKind = Literal["project", "user"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuotaRecord:
    """A quota of jobs and its use now.

    Attributes:
        holder: Whether a project or a user has it.
        name: Name of the project or the user.
        spec: The limits.
        devices: Kind of device -> devices in use.
        nodes: Nodes in use.
        jobs: Jobs that hold machines.
        today_usd: Cost of its jobs today, in UTC.
        month_usd: Cost of its jobs this month, in UTC.
    """

    holder: HolderKind
    name: str
    spec: JobQuotaSpec
    devices: Mapping[str, int] = field(default_factory=dict)
    nodes: int = 0
    jobs: int = 0
    today_usd: float = 0.0
    month_usd: float = 0.0
