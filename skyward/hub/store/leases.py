"""SQL of leases: of several servers on one database, one holds a lease at a time, by the database's clock."""

from __future__ import annotations

from .transaction import ReadSnapshot, Transaction

_POSTGRESQL_CLOCK = "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"
"""Asked each time, because a machine that slept is behind with the time that it remembers."""


class NotHeld(Exception):
    """Another process has taken the lease meanwhile. The transaction that raises this changes nothing."""


def take_lease(tx: Transaction, name: str, holder: str, lasts_ms: int) -> int | None:
    """Take or renew a lease, and return its fence: a number that grows with each change of the holder.

    It waits for no other process: one that was stopped in the middle of a transaction delays only itself.

    Args:
        tx: Transaction.
        name: Name of the lease. Its row is there from the database's first day.
        holder: Name of this process, which no other one ever has.
        lasts_ms: Time until it expires.

    Returns:
        The fence. None: another process holds the lease.
    """
    clock, now = (_POSTGRESQL_CLOCK, ()) if tx.is_postgresql else ("?", (tx.now,))
    row = tx.execute(
        "SELECT holder, fence FROM lease WHERE name = ?"
        f" AND (holder = ? OR expires_at <= {clock}){' FOR UPDATE SKIP LOCKED' if tx.is_postgresql else ''}",
        (name, holder, *now),
    ).fetchone()
    if row is None:
        return None
    fence = int(row[1]) + int(row[0] != holder)
    tx.execute(
        f"UPDATE lease SET holder = ?, fence = ?, expires_at = {clock} + ? WHERE name = ?",
        (holder, fence, *now, lasts_ms, name),
    )
    return fence


def need_lease(tx: Transaction, name: str, fence: int) -> None:
    """Check that a lease has not changed hands, and keep it so until the commit.

    Raises:
        NotHeld: It has.
    """
    row = tx.execute(f"SELECT 1 FROM lease WHERE name = ? AND fence = ?{tx.for_update}", (name, fence)).fetchone()
    if row is None:
        raise NotHeld(name)


def has_fence(snapshot: ReadSnapshot, name: str, fence: int) -> bool:
    """Return whether a lease has not changed hands. Nothing keeps it so; `need_lease` does."""
    return snapshot.execute("SELECT 1 FROM lease WHERE name = ? AND fence = ?", (name, fence)).fetchone() is not None


def give_up_lease(tx: Transaction, name: str, fence: int) -> None:
    """Let a lease expire now."""
    tx.execute("UPDATE lease SET expires_at = 0 WHERE name = ? AND fence = ?", (name, fence))


def end_lease(tx: Transaction, name: str) -> None:
    """Let a lease expire now, whoever holds it. The caller knows that the holder has ended."""
    tx.execute("UPDATE lease SET expires_at = 0 WHERE name = ?", (name,))


def add_lease(tx: Transaction, name: str) -> None:
    """Add the row of a lease that nobody holds, unless it is there."""
    tx.execute(
        "INSERT INTO lease (name, holder, fence, expires_at) VALUES (?, '', 0, 0) ON CONFLICT DO NOTHING", (name,)
    )


def expiry_of(snapshot: ReadSnapshot, name: str) -> int:
    """Return the time at which a lease expires; 0 if nobody has taken it."""
    row = snapshot.execute("SELECT expires_at FROM lease WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else int(row[0])


def drop_lease(tx: Transaction, name: str) -> None:
    """Delete the row of a lease."""
    tx.execute("DELETE FROM lease WHERE name = ?", (name,))
