"""SQL of limits. The transaction of each addition counts the use on, and that of a deletion counts it again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..model.quotas import Limit, Quota
from .journal import lock_journal
from .transaction import ReadSnapshot, Transaction

_COUNTS = {
    Quota.RUNS: "SELECT count(*) FROM run WHERE project = ?",
    Quota.ARTIFACT_BYTES: "SELECT coalesce(sum(size), 0) FROM blob WHERE project = ?",
}


def find_limit(snapshot: ReadSnapshot, project: int, quota: Quota) -> Limit | None:
    """Return a limit with its use. None: there is no limit."""
    row = snapshot.execute(
        "SELECT most, used FROM quota WHERE project = ? AND name = ?", (project, quota.value)
    ).fetchone()
    return Limit(quota, int(row[0]), int(row[1])) if row else None


def limits_of(snapshot: ReadSnapshot, project: int) -> list[Limit]:
    """Return each quota of a project, limited or not, with its use."""
    return [
        find_limit(snapshot, project, quota) or Limit(quota, None, _count(snapshot, project, quota)) for quota in Quota
    ]


def set_limit(tx: Transaction, project: int, quota: Quota, most: int | None) -> None:
    """Set or remove a limit, and count its use."""
    _stop_additions(tx, [project])
    tx.execute("DELETE FROM quota WHERE project = ? AND name = ?", (project, quota.value))
    if most is not None:
        tx.execute(
            "INSERT INTO quota (project, name, most, used) VALUES (?, ?, ?, ?)",
            (project, quota.value, most, _count(tx, project, quota)),
        )


def charge(tx: Transaction, project: int, quota: Quota, more: int) -> None:
    """Count something that was just added. Call it after the row was: see `_stop_additions`.

    Raises:
        Refusal: That is too much. The operation is undone, and its count with it.
    """
    if find_limit(tx, project, quota) is None:
        return
    lock_journal(tx)  # which each change needs: two servers that took these in different orders would wait for ever
    row = tx.execute(
        "UPDATE quota SET used = used + ? WHERE project = ? AND name = ? RETURNING most, used - ?",
        (more, project, quota.value, more),
    ).fetchone()
    if row is not None:
        Limit(quota, int(row[0]), int(row[1])).check(more)


def recount(tx: Transaction) -> None:
    """Count the use of each limit again, after things were deleted."""
    limited = _all(tx)
    _stop_additions(tx, sorted({project for project, _, _ in limited}))
    for project, quota, _ in limited:
        tx.execute(
            "UPDATE quota SET used = ? WHERE project = ? AND name = ?",
            (_count(tx, project, quota), project, quota.value),
        )


def miscounts(snapshot: ReadSnapshot) -> Iterator[tuple[int, Quota, int, int]]:
    """Yield project, quota, recorded use and counted use where these differ."""
    for project, quota, used in _all(snapshot):
        counted = _count(snapshot, project, quota)
        if counted != used:
            yield project, quota, used, counted


def _all(snapshot: ReadSnapshot) -> list[tuple[int, Quota, int]]:
    rows = snapshot.execute("SELECT project, name, used FROM quota ORDER BY project, name").fetchall()
    return [(project, Quota(name), int(used)) for project, name, used in rows]


def _count(snapshot: ReadSnapshot, project: int, quota: Quota) -> int:
    return int(snapshot.execute(_COUNTS[quota], (project,)).fetchone()[0])


def _stop_additions(tx: Transaction, projects: Sequence[int]) -> None:
    """Wait for additions of other servers to these projects, and let none begin before the commit.

    Each row that is added holds a weak lock of its project, because it refers to it. So an addition is committed and
    counted here, or its own `charge` finds the limit.
    """
    for project in projects:
        tx.execute(f"SELECT 1 FROM project WHERE id = ?{tx.for_update}", (project,)).fetchone()
    lock_journal(tx)
