"""Record of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "skipped", "failed", "late"]


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One evaluation of one snapshot.

    Times are seconds since 1970, by the clock of the training process. `status` is one of:

    - `ok`: `metrics` belong to the weights at `step`
    - `skipped`: not sent, because earlier evaluations had not ended; `error` has the reason
    - `failed`: `eval_fn` raised, returned no dictionary or ran too long, or its worker died; `error` says which
    - `late`: as `ok`, but training was further ahead than `max_age_steps`. Late metrics are recorded and logged, and
      never stop training. They may be the best ones, because their weights were kept.

    Example:
        >>> record = EvaluationRecord(
        ...     step=100, snapshot_id="a", submitted_at=10.0, started_at=10.5, finished_at=12.0, status="ok",
        ...     metrics={"eval_loss": 0.5},
        ... )
        >>> record.elapsed_s
        1.5
    """

    step: int
    """Optimizer steps of the scored weights."""
    epoch: float | None = None
    snapshot_id: str
    submitted_at: float
    started_at: float | None = None
    """None if it never started."""
    finished_at: float | None = None
    worker: str = ""
    """Name of the worker; empty if it never ran."""
    status: Status
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def elapsed_s(self) -> float | None:
        """Seconds of the evaluation itself, without waiting; None if it did not run."""
        if self.started_at is None or self.finished_at is None:
            return None
        return self.finished_at - self.started_at

    def row(self) -> dict[str, Any]:
        """Return all fields as one dict, with metrics at the top level; the record's own names win."""
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
