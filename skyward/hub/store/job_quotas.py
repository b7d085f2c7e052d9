"""Rows of quotas of jobs, and of what jobs cost on each day."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime

from ..model.quotas import HolderKind, JobQuotaSpec
from .transaction import ReadSnapshot, Transaction

DAY_MS = 86_400_000


def job_quotas(snapshot: ReadSnapshot) -> dict[tuple[HolderKind, str], JobQuotaSpec]:
    """Return holder and name -> quota, sorted."""
    rows = snapshot.execute("SELECT holder, name, body FROM job_quota ORDER BY holder, name").fetchall()
    return {(holder, name): JobQuotaSpec(**json.loads(body)) for holder, name, body in rows}


def set_job_quota(tx: Transaction, holder: HolderKind, name: str, spec: JobQuotaSpec) -> None:
    """Set a quota. One without limits is removed."""
    tx.execute("DELETE FROM job_quota WHERE holder = ? AND name = ?", (holder, name))
    if spec != JobQuotaSpec():
        body = json.dumps(asdict(spec), separators=(",", ":"))
        tx.execute("INSERT INTO job_quota (holder, name, body) VALUES (?, ?, ?)", (holder, name, body))


def add_spending(tx: Transaction, project: int, owner: str, usd: float) -> None:
    """Add to what the jobs of a project's user cost today."""
    tx.execute(
        "INSERT INTO job_spending (project, owner, day, usd) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (project, owner, day) DO UPDATE SET usd = job_spending.usd + excluded.usd",
        (project, owner, tx.now // DAY_MS, usd),
    )


class JobSpending:
    """Cost of jobs today and this month, in UTC.

    Attributes:
        projects: Primary key of a project -> USD of today, and of this month.
        users: Name of a user -> USD of today, and of this month.
    """

    def __init__(self, snapshot: ReadSnapshot, now: int) -> None:
        self.projects: dict[int, tuple[float, float]] = {}
        self.users: dict[str, tuple[float, float]] = {}
        today = now // DAY_MS
        first = today - datetime.fromtimestamp(now / 1000, UTC).day + 1
        rows = snapshot.execute(
            "SELECT project, owner, day, usd FROM job_spending WHERE day >= ? AND day <= ?", (first, today)
        ).fetchall()
        for project, owner, day, usd in rows:
            of_today = usd if day == today else 0.0
            self.projects[project] = _sum(self.projects.get(project, (0.0, 0.0)), of_today, usd)
            self.users[owner] = _sum(self.users.get(owner, (0.0, 0.0)), of_today, usd)


def _sum(spent: tuple[float, float], today: float, month: float) -> tuple[float, float]:
    return spent[0] + today, spent[1] + month
