"""Rows of usage: they stay when jobs are deleted, because somebody pays for what they used."""

from __future__ import annotations

from collections.abc import Mapping

from ..model.usage import DayOfUse, EndedJobs
from .transaction import ReadSnapshot, Transaction


def add_use(
    tx: Transaction, project: int, day: int, kind: str, *, seconds: float, cost_usd: float, attempts: int
) -> None:
    """Count devices and money of an attempt on a day."""
    tx.execute(
        "INSERT INTO job_use (project, day, kind, seconds, cost, attempts) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (project, day, kind) DO UPDATE SET seconds = job_use.seconds + excluded.seconds,"
        " cost = job_use.cost + excluded.cost, attempts = job_use.attempts + excluded.attempts",
        (project, day, kind, seconds, cost_usd, attempts),
    )


def days_of_use(snapshot: ReadSnapshot, names: Mapping[int, str], first_day: int) -> list[DayOfUse]:
    """Return the use by these projects (number -> name) since a day, in the order of the days."""
    rows = snapshot.execute(
        "SELECT project, day, kind, seconds, cost, attempts FROM job_use WHERE day >= ? ORDER BY day, project, kind",
        (first_day,),
    ).fetchall()
    return [
        DayOfUse(project=names[project], day=day, kind=kind, seconds=seconds, cost_usd=cost, attempts=attempts)
        for project, day, kind, seconds, cost, attempts in rows
        if project in names
    ]


def device_seconds(snapshot: ReadSnapshot, names: Mapping[int, str]) -> dict[tuple[str, str], float]:
    """Return (kind of device, project) -> device-seconds since the hub has existed."""
    rows = snapshot.execute("SELECT kind, project, sum(seconds) FROM job_use GROUP BY kind, project").fetchall()
    return {(kind, names[project]): float(seconds) for kind, project, seconds in rows if project in names}


def add_end(tx: Transaction, project: int, job_type: str, state: str, bound_s: int, seconds: float) -> None:
    """Count a job that ended."""
    tx.execute(
        "INSERT INTO job_end (project, type, state, bound, jobs, seconds) VALUES (?, ?, ?, ?, 1, ?)"
        " ON CONFLICT (project, type, state, bound) DO UPDATE SET jobs = job_end.jobs + 1,"
        " seconds = job_end.seconds + excluded.seconds",
        (project, job_type, state, bound_s, seconds),
    )


def ended_jobs(snapshot: ReadSnapshot, names: Mapping[int, str]) -> list[EndedJobs]:
    """Return the jobs that ended since the hub has existed, counted."""
    rows = snapshot.execute(
        "SELECT project, type, state, bound, jobs, seconds FROM job_end ORDER BY project, type, state, bound"
    ).fetchall()
    return [
        EndedJobs(project=names[project], type=kind, state=state, bound_s=bound, jobs=count, seconds=seconds)
        for project, kind, state, bound, count, seconds in rows
        if project in names
    ]


def count_unfinished(snapshot: ReadSnapshot) -> list[tuple[int, str, int, str, int]]:
    """Return project, type, priority, state and number of the jobs that are not over."""
    rows = snapshot.execute(
        "SELECT project, type, priority, state, count(*) FROM job WHERE ended_at IS NULL"
        " GROUP BY project, type, priority, state"
    ).fetchall()
    return [(int(project), kind, int(priority), state, int(count)) for project, kind, priority, state, count in rows]
