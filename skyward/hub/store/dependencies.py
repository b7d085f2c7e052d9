"""Rows of jobs that wait for others. A row is there while the job waits."""

from __future__ import annotations

from collections.abc import Iterable

from .transaction import ReadSnapshot, Transaction


def add_dependencies(tx: Transaction, job: int, after: Iterable[int]) -> None:
    """Let a job wait for others."""
    tx.execute_many("INSERT INTO job_after (job, after) VALUES (?, ?)", [(job, pk) for pk in after])


def open_dependencies(snapshot: ReadSnapshot, job: int) -> list[str]:
    """Return the ids of the jobs that a job waits for, in their order."""
    rows = snapshot.execute(
        "SELECT j.id FROM job_after d JOIN job j ON j.pk = d.after WHERE d.job = ? ORDER BY j.pk", (job,)
    ).fetchall()
    return [str(row[0]) for row in rows]


def settled(snapshot: ReadSnapshot) -> list[tuple[int, int, str]]:
    """Return each job that waits for one that is over, with that one and its state."""
    rows = snapshot.execute(
        "SELECT d.job, d.after, j.state FROM job_after d JOIN job j ON j.pk = d.after WHERE j.ended_at IS NOT NULL"
        " ORDER BY d.job, d.after"
    ).fetchall()
    return [(int(job), int(after), str(state)) for job, after, state in rows]


def forget(tx: Transaction, job: int, after: int | None = None) -> None:
    """Let a job no longer wait for another one; None for any."""
    if after is None:
        tx.execute("DELETE FROM job_after WHERE job = ?", (job,))
    else:
        tx.execute("DELETE FROM job_after WHERE job = ? AND after = ?", (job, after))


def id_of(snapshot: ReadSnapshot, job: int) -> str:
    row = snapshot.execute("SELECT id FROM job WHERE pk = ?", (job,)).fetchone()
    return "" if row is None else str(row[0])
