"""What became of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["EvaluationRecord", "Status"]

Status = Literal["ok", "skipped", "failed", "late"]


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One evaluation of one snapshot. Times are seconds since 1970, by the clock of the process that trains.

    status:
        ok: `metrics` are of the weights at `step`.
        skipped: it was not sent, as those before it had not ended; `error` says so.
        failed: `eval_fn` raised, gave no dictionary, or did not end in time, or its worker died; `error` says which.
        late: `metrics` are of the weights at `step`, but training was further ahead than `max_age_steps` when they
            came: they are recorded and logged, and stop nothing. They may be the best: their weights were kept.
    """

    step: int
    """Optimizer steps that the scored weights had made."""
    epoch: float | None = None
    snapshot_id: str
    submitted_at: float
    started_at: float | None = None
    """None: it never started."""
    finished_at: float | None = None
    worker: str = ""
    """Where it ran; "" where it did not."""
    status: Status
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def elapsed_s(self) -> float | None:
        """Seconds of the evaluation itself, without what it waited for."""
        if self.started_at is None or self.finished_at is None:
            return None
        return self.finished_at - self.started_at

    def row(self) -> dict[str, Any]:
        """All of it, metrics at the top level, as histories and logs hold it. The record's own names win."""
        return {
            **self.metrics,
            "step": self.step,
            "epoch": self.epoch,
            "snapshot_id": self.snapshot_id,
            "submitted_at": self.submitted_at,
            "started_at": self.started_at,
            "finished_at": self.finished_at,
            "elapsed_secs": self.elapsed_s,
            "worker": self.worker,
            "status": self.status,
            **({"error": self.error} if self.error else {}),
        }
