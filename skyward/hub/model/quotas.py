"""Limits of a project."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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
