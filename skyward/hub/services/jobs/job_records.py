"""Jobs as they are read: found in their project, and told with their attempts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...model.access import Actor
from ...model.jobs import BLOBS, AttemptRecord, JobPriority, JobRecord, JobState
from ...model.refusal import Reason, Refusal
from ...store import attempts, jobs
from ...store.attempts import AttemptRow
from ...store.jobs import JobRow
from ...store.transaction import ReadSnapshot


def need_job(snapshot: ReadSnapshot, actor: Actor, job_id: str, *, for_update: str = "") -> JobRow:
    """Return a job of the actor's project.

    Raises:
        Refusal: There is none.
    """
    row = jobs.find_job(snapshot, actor.project, job_id, for_update=for_update)
    if row is None:
        raise Refusal(
            Reason.MISSING, f"job={job_id[:80]!r}: no such job in this project; see the list of jobs", field="job"
        )
    return row


def list_jobs(snapshot: ReadSnapshot, *wanted: Any) -> list[tuple[JobRow, int | None]]:
    """Return jobs, each with the time of its last checkpoint; see `jobs_before`."""
    rows = jobs.jobs_before(snapshot, *wanted)
    saves = attempts.last_saves(snapshot, [row.pk for row in rows])
    return [(row, saves.get(row.pk)) for row in rows]


def whole_job(snapshot: ReadSnapshot, actor: Actor, job_id: str) -> JobRecord:
    """Return a job with its attempts and the names of its results."""
    row = need_job(snapshot, actor, job_id)
    results = [name for name in jobs.blobs_of(snapshot, row.pk) if name in BLOBS[2:]]
    rows = attempts.attempts_of(snapshot, row.pk)
    open_cost = sum(attempt.cost for attempt in rows if attempt.ended_at is None)
    tried = [_attempt_record(attempt, _pool_of(snapshot, row, attempt)) for attempt in rows]
    saved_at = max((attempt.saved_at for attempt in rows if attempt.saved_at is not None), default=None)
    return record_of(row, tried, results, open_cost=open_cost, saved_at=saved_at)


def record_of(
    row: JobRow,
    tried: Sequence[AttemptRecord] = (),
    results: Sequence[str] = (),
    *,
    open_cost: float = 0.0,
    saved_at: int | None = None,
) -> JobRecord:
    """Return a job as its user sees it. `open_cost` is the cost so far of an attempt that is not over."""
    return JobRecord(
        id=row.id,
        name=row.name,
        type=row.type,
        user=row.owner,
        state=JobState(row.state),
        is_held=row.is_held,
        priority=JobPriority(row.priority),
        spec=row.decoded_spec(),
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        why=row.why,
        cost_usd=row.cost + open_cost,
        attempt_count=row.attempts,
        results=results,
        attempts=tried,
        saved_at=saved_at,
    )


def _pool_of(snapshot: ReadSnapshot, row: JobRow, attempt: AttemptRow) -> str:
    """Return the name of an attempt's pool. A kept one has that of the job for which it was opened."""
    first = None if attempt.runner is None else attempts.attempt_numbered(snapshot, attempt.runner)
    return f"job-{(row if first is None else first[0]).id[:8]}"


def _attempt_record(row: AttemptRow, pool: str) -> AttemptRecord:
    return AttemptRecord(
        number=row.number,
        machines=row.machines,
        nodes=row.node_numbers,
        reserved_at=row.reserved_at,
        began_at=row.began_at,
        ended_at=row.ended_at,
        end=row.outcome,
        error=row.error,
        cost_usd=row.cost,
        output_bytes=row.output,
        kept_until=row.kept_until,
        idle_cost_usd=row.idle_cost or 0.0,
        pool=pool,
    )
