"""Rows of jobs and their blobs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from functools import lru_cache

from ..model.jobs import TRANSITIONS, FailureCounts, JobPriority, JobSpec, JobState
from .transaction import ReadSnapshot, Transaction


@dataclass(slots=True, kw_only=True)
class JobRow:
    """Row of `job`. The order of the fields is that of the columns."""

    project: int
    id: str
    key: str | None
    name: str
    type: str
    owner: str
    state: str = JobState.QUEUED
    is_held: bool = False
    priority: int = JobPriority.MEDIUM
    spec: str
    created_at: int
    not_before: int = 0
    started_at: int | None = None
    ended_at: int | None = None
    ends_as: str | None = None
    why: str = ""
    has_turn: bool = False
    attempts: int = 0
    cost: float = 0.0
    user_failures: int = 0
    start_failures: int = 0
    losses: int = 0
    warm: str | None = None
    wait_until: int | None = None
    cron: str | None = None
    next_at: int | None = None
    origin: int | None = None
    tell_at: int | None = None
    pk: int = 0

    def enter(self, state: JobState, now: int) -> None:
        """Change the state, as `TRANSITIONS` allows.

        Raises:
            ValueError: It does not.
        """
        if state not in TRANSITIONS[JobState(self.state)]:
            raise ValueError(f"job={self.id}: cannot go from {self.state} to {state}; see TRANSITIONS")
        self.state = state
        self.why = ""
        if state is JobState.RUNNING:
            self.started_at = self.started_at or now
            self.wait_until = self.tell_at = None
        self.ended_at = now if state.is_final else None
        if state.is_final:
            self.tell_at = None

    @property
    def failures(self) -> FailureCounts:
        return FailureCounts(user=self.user_failures, start=self.start_failures, lost=self.losses)

    @failures.setter
    def failures(self, counted: FailureCounts) -> None:
        self.user_failures, self.start_failures, self.losses = counted.user, counted.start, counted.lost

    def decoded_spec(self) -> JobSpec:
        """Return the spec, which never changes. Do not change the lists in it: other callers get them too."""
        return _decoded(self.spec)


@lru_cache(maxsize=16_384)  # each decision needs those of all waiting jobs
def _decoded(text: str) -> JobSpec:
    return JobSpec(**json.loads(text))


_NAMES = tuple(field.name for field in fields(JobRow))
_COLUMNS = ", ".join(f"j.{name}" for name in _NAMES)
_GIVEN = _NAMES[:-1]
_CHANGING = _NAMES[_NAMES.index("state") : _NAMES.index("pk")]


def encoded_spec(spec: JobSpec) -> str:
    return json.dumps(asdict(spec), separators=(",", ":"))


def row_of(values: Iterable[object]) -> JobRow:
    """Make a row of the columns that `columns()` names."""
    row = JobRow(**dict(zip(_NAMES, values, strict=True)))  # type: ignore[arg-type]
    row.is_held, row.has_turn = bool(row.is_held), bool(row.has_turn)  # SQLite has integers
    return row


def columns() -> str:
    """Return the columns of `row_of`, of a table `j`."""
    return _COLUMNS


def count_columns() -> int:
    return len(_NAMES)


def add_job(tx: Transaction, row: JobRow) -> None:
    """Add a job, and give it its number."""
    made = tx.execute(
        f"INSERT INTO job ({', '.join(_GIVEN)}) VALUES ({', '.join('?' * len(_GIVEN))}) RETURNING pk", astuple(row)[:-1]
    ).fetchone()
    row.pk = int(made[0])


def find_job(snapshot: ReadSnapshot, project: int, job_id: str, *, for_update: str = "") -> JobRow | None:
    """Return a job of a project. `for_update` is that of a transaction that is about to change it."""
    row = snapshot.execute(
        f"SELECT {_COLUMNS} FROM job j WHERE j.project = ? AND j.id = ?{for_update}", (project, job_id)
    ).fetchone()
    return row_of(row) if row else None


def find_job_by_key(snapshot: ReadSnapshot, project: int, key: str) -> JobRow | None:
    row = snapshot.execute(f"SELECT {_COLUMNS} FROM job j WHERE j.project = ? AND j.key = ?", (project, key)).fetchone()
    return row_of(row) if row else None


def trial_key(sweep: int, number: int) -> str:
    """Return the key of the job that runs a trial. No key of a client has a slash."""
    return f"sweep/{sweep}/{number}"


def jobs_before(
    snapshot: ReadSnapshot,
    project: int,
    limit: int,
    before: int | None,
    states: Iterable[JobState] = (),
    sweep: int | None = None,
    with_trials: bool = True,
) -> list[JobRow]:
    """Return jobs of a project, the newest first, from behind the number `before`; with `sweep`, its trials.

    `with_trials` is whether jobs that are trials are among them.
    """
    chosen = [str(state) for state in states]
    condition = f" AND j.state IN ({', '.join('?' * len(chosen))})" if chosen else ""
    if sweep is not None:
        condition += " AND j.key LIKE ?"
        chosen.append(f"sweep/{sweep}/%")
    elif not with_trials:
        condition += " AND (j.key IS NULL OR j.key NOT LIKE ?)"
        chosen.append("sweep/%")  # PostgreSQL's driver takes no % in the text
    rows = snapshot.execute(
        f"SELECT {_COLUMNS} FROM job j WHERE j.project = ? AND j.pk < ?{condition} ORDER BY j.pk DESC LIMIT ?",
        (project, 2**62 if before is None else before, *chosen, limit),
    ).fetchall()
    return [row_of(row) for row in rows]


def unfinished_trials(snapshot: ReadSnapshot, sweep: int, *, for_update: str = "") -> list[JobRow]:
    """Return the jobs of a sweep's trials that are not over."""
    # Without the project, which a sweep has anyway: drivers ask often, and SQLite would look at all of its jobs.
    live = [str(state) for state in JobState if not state.is_final]
    rows = snapshot.execute(
        f"SELECT {_COLUMNS} FROM job j WHERE j.ended_at IS NULL AND j.state IN ({', '.join('?' * len(live))})"
        f" AND j.key LIKE ? ORDER BY j.pk{for_update}",
        (*live, f"sweep/{sweep}/%"),
    ).fetchall()
    return [row_of(row) for row in rows]


def unfinished_jobs(snapshot: ReadSnapshot, project: int, limit: int | None) -> list[JobRow]:
    """Return jobs of a project that are not over, those with machines first, then the oldest first."""
    rows = snapshot.execute(
        f"SELECT {_COLUMNS} FROM job j WHERE j.project = ? AND j.ended_at IS NULL"
        " ORDER BY (CASE WHEN j.state = 'queued' THEN 1 ELSE 0 END), j.pk LIMIT ?",
        (project, 2**31 if limit is None else limit),
    ).fetchall()
    return [row_of(row) for row in rows]


def waiting_jobs(snapshot: ReadSnapshot, now: int, *, for_update: str = "") -> list[JobRow]:
    """Return the jobs that may begin now, of all projects. `for_update` is that of a transaction that changes them."""
    rows = snapshot.execute(
        f"SELECT {_COLUMNS} FROM job j WHERE j.ended_at IS NULL AND j.state = 'queued' AND NOT j.is_held"
        " AND j.not_before <= ? AND j.cron IS NULL AND NOT EXISTS (SELECT 1 FROM job_after d WHERE d.job = j.pk)"
        f" ORDER BY j.pk{for_update}",
        (now,),
    ).fetchall()
    return [row_of(row) for row in rows]


def due_schedules(snapshot: ReadSnapshot, now: int, *, for_update: str = "") -> list[JobRow]:
    """Return the schedules whose next job is due."""
    return _queued(snapshot, "j.cron IS NOT NULL AND NOT j.is_held AND j.next_at <= ?", now, for_update)


def late_jobs(snapshot: ReadSnapshot, now: int, *, for_update: str = "") -> list[JobRow]:
    """Return the jobs that have waited for as long as they may."""
    return _queued(snapshot, "j.wait_until <= ? AND NOT j.is_held", now, for_update)


def jobs_to_tell(snapshot: ReadSnapshot, now: int, *, for_update: str = "") -> list[JobRow]:
    """Return the waiting jobs whose owners are to be told that they still wait."""
    return _queued(snapshot, "j.tell_at <= ? AND NOT j.is_held", now, for_update)


def _queued(snapshot: ReadSnapshot, condition: str, now: int, for_update: str) -> list[JobRow]:
    rows = snapshot.execute(
        f"SELECT {_COLUMNS} FROM job j WHERE j.ended_at IS NULL AND j.state = 'queued' AND {condition}"
        f" ORDER BY j.pk{for_update}",
        (now,),
    ).fetchall()
    return [row_of(row) for row in rows]


def job_numbered(snapshot: ReadSnapshot, pk: int) -> JobRow | None:
    """Return a job by its number in the table."""
    row = snapshot.execute(f"SELECT {_COLUMNS} FROM job j WHERE j.pk = ?", (pk,)).fetchone()
    return row_of(row) if row else None


def has_unfinished_child(snapshot: ReadSnapshot, schedule: int) -> bool:
    """Return whether a job that a schedule made is not over."""
    row = snapshot.execute("SELECT 1 FROM job WHERE ended_at IS NULL AND origin = ? LIMIT 1", (schedule,)).fetchone()
    return row is not None


def update_job(tx: Transaction, row: JobRow) -> None:
    """Write the columns that change."""
    changes = ", ".join(f"{name} = ?" for name in _CHANGING)
    tx.execute(f"UPDATE job SET {changes} WHERE pk = ?", (*(getattr(row, name) for name in _CHANGING), row.pk))


def set_reasons(tx: Transaction, reasons: Iterable[tuple[str, bool, int]]) -> None:
    """Write why jobs wait, and whether they keep their turn."""
    tx.execute_many("UPDATE job SET why = ?, has_turn = ? WHERE pk = ?", list(reasons))


def delete_job(tx: Transaction, job: int) -> None:
    """Delete a job with its attempts and all that they sent. Retention takes its bytes."""
    _drop_feeds(tx, job)
    for table in ("attempt", "job_blob", "delivery"):
        tx.execute(f"DELETE FROM {table} WHERE job = ?", (job,))
    tx.execute("DELETE FROM job_after WHERE job = ? OR after = ?", (job, job))
    tx.execute("DELETE FROM job WHERE pk = ?", (job,))


# Blobs ----------------------------------------------------------------------------------------------------------------


def set_blob(tx: Transaction, job: int, name: str, sha256: str, size: int) -> None:
    tx.execute(
        "INSERT INTO job_blob (job, name, sha256, size) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (job, name) DO UPDATE SET sha256 = excluded.sha256, size = excluded.size",
        (job, name, sha256, size),
    )


def blobs_of(snapshot: ReadSnapshot, job: int) -> Mapping[str, tuple[str, int]]:
    """Return name -> hash and size of each blob of a job."""
    rows = snapshot.execute("SELECT name, sha256, size FROM job_blob WHERE job = ?", (job,)).fetchall()
    return {name: (sha256, size) for name, sha256, size in rows}


def old_jobs(snapshot: ReadSnapshot, before: int, limit: int) -> list[int]:
    """Return jobs that ended before a time and have bytes still: blobs, output or items."""
    rows = snapshot.execute(
        "SELECT j.pk FROM job j WHERE j.ended_at < ? AND (EXISTS (SELECT 1 FROM job_blob b WHERE b.job = j.pk)"
        " OR EXISTS (SELECT 1 FROM attempt a WHERE a.job = j.pk AND (a.output > 0 OR a.items > 0)))"
        " ORDER BY j.pk LIMIT ?",
        (before, limit),
    ).fetchall()
    return [int(row[0]) for row in rows]


def drop_bytes(tx: Transaction, job: int) -> None:
    """Forget the blobs, the output and the items of a job. Its attempts stay."""
    _drop_feeds(tx, job)
    tx.execute("UPDATE attempt SET output = 0, items = NULL WHERE job = ?", (job,))
    tx.execute("DELETE FROM job_blob WHERE job = ?", (job,))


def _drop_feeds(tx: Transaction, job: int) -> None:
    for table in ("job_output", "job_items"):
        tx.execute(f"DELETE FROM {table} WHERE attempt IN (SELECT pk FROM attempt WHERE job = ?)", (job,))


def drop_results(tx: Transaction, job: int) -> None:
    """Forget value and error, before a job begins again."""
    tx.execute("DELETE FROM job_blob WHERE job = ? AND name IN ('value', 'error')", (job,))
