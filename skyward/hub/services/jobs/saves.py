"""Saves of jobs: noted by their trainings, and missed when they do not come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...model.jobs import JobState
from ...model.notices import NoticeKind
from ...store import attempts
from ...store.attempts import AttemptRow
from ...store.jobs import JobRow
from ...store.transaction import Transaction
from .life import announce
from .notices import notify

LATE = 1.5
"""Intervals after which the newest checkpoint of a job is too old: a save takes time, and its news too."""


def note_saves(tx: Transaction, job: JobRow, attempt: AttemptRow, saves: Sequence[Mapping[str, Any]]) -> None:
    """Note saves that a runner reports, each number once. The caller writes the row of the attempt."""
    for note in saves:
        if note["number"] <= (attempt.saves or 0):  # its answer was lost, and it was sent again
            continue
        attempt.saves, attempt.late_at = note["number"], None
        attempt.saved_at = max(attempt.saved_at or 0, tx.now - int(note["age_s"] * 1000))
        announce(tx, job, "job.saved", {name: note[name] for name in ("path", "step", "bytes", "seconds")})


def tell_late_saves(tx: Transaction, active: Iterable[tuple[JobRow, AttemptRow]]) -> None:
    """Tell the owners of running jobs whose newest checkpoint is too old, once until the next save."""
    for job, attempt in active:
        interval_s = job.decoded_spec().checkpoint_interval_s
        if interval_s is None or attempt.late_at is not None or job.state != JobState.RUNNING:
            continue
        newest = max(attempt.saved_at or 0, attempt.began_at or tx.now)
        if tx.now - newest > LATE * interval_s * 1000:
            attempt.late_at = tx.now
            attempts.update_attempt(tx, attempt)
            announce(tx, job, "job.checkpoint_late")
            age = f"{(tx.now - newest) / 1000:.0f} s"
            what = f"the newest checkpoint is {age} old" if attempt.saved_at else f"no checkpoint in {age}"
            notify(tx, job, NoticeKind.CHECKPOINT_LATE, f"{what}; its interval is {interval_s:g} s")
