"""SQL of the audit and of events. Both are written in the transaction of the change that they tell of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .transaction import ReadSnapshot, Transaction

_CHAIN_LOCK = 0x736B7A  # of PostgreSQL's advisory locks
FIRST_HASH = "0" * 64


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One entry of the audit."""

    id: int
    organization: int
    project: int
    at: int
    actor: str
    token: str | None
    action: str
    resource: str
    detail: str
    hash: str


@dataclass(frozen=True, slots=True)
class EventRow:
    """One event."""

    id: int
    project: int
    at: int
    kind: str
    resource: str
    body: str


def lock_journal(tx: Transaction) -> None:
    """Make the ids of several servers grow in the order of their commits, so that a reader misses none."""
    if tx.is_postgresql:
        tx.execute("SELECT pg_advisory_xact_lock(?)", (_CHAIN_LOCK,))


def add_audit(
    tx: Transaction,
    organization: int,
    project: int,
    actor: str,
    token: str | None,
    action: str,
    resource: str,
    detail: Mapping[str, object],
) -> None:
    lock_journal(tx)
    row = tx.execute(
        "SELECT hash FROM audit WHERE id = (SELECT MAX(id) FROM audit)",
    ).fetchone()
    text = json.dumps(detail, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    values = (organization, project, tx.now, actor, token, action, resource, text)
    tx.execute(
        "INSERT INTO audit (organization, project, at, actor, token, action, resource, detail, hash)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*values, chained(row[0] if row else FIRST_HASH, values)),
    )


def chained(previous: str, values: Sequence[object]) -> str:
    """Return the hash of an entry behind the one with the hash `previous`."""
    return hashlib.sha256(json.dumps([previous, *values], separators=(",", ":")).encode()).hexdigest()


def audit_page(
    snapshot: ReadSnapshot, organization: int, project: int | None, before: int, limit: int
) -> list[AuditRow]:
    """Return entries with ids below `before`, newest first."""
    columns = "id, organization, project, at, actor, token, action, resource, detail, hash"
    if project is None:
        rows = snapshot.execute(
            f"SELECT {columns} FROM audit WHERE organization = ? AND id < ? ORDER BY id DESC LIMIT ?",
            (organization, before, limit),
        )
    else:
        rows = snapshot.execute(
            f"SELECT {columns} FROM audit WHERE project = ? AND id < ? ORDER BY id DESC LIMIT ?",
            (project, before, limit),
        )
    return [AuditRow(*row) for row in rows.fetchall()]


def audit_rows(snapshot: ReadSnapshot) -> Iterator[AuditRow]:
    """Yield all entries, oldest first."""
    cursor = snapshot.execute(
        "SELECT id, organization, project, at, actor, token, action, resource, detail, hash FROM audit ORDER BY id"
    )
    for row in cursor:
        yield AuditRow(*row)


def first_break(snapshot: ReadSnapshot) -> int | None:
    """Recompute the chain. Returns the id of the first entry whose hash does not fit, or None."""
    previous = FIRST_HASH
    for row in audit_rows(snapshot):
        values = (row.organization, row.project, row.at, row.actor, row.token, row.action, row.resource, row.detail)
        if chained(previous, values) != row.hash:
            return row.id
        previous = row.hash
    return None


def add_event(
    tx: Transaction, organization: int, project: int, kind: str, resource: str, body: Mapping[str, object]
) -> None:
    lock_journal(tx)
    tx.execute(
        "INSERT INTO event (organization, project, at, kind, resource, body) VALUES (?, ?, ?, ?, ?, ?)",
        (organization, project, tx.now, kind, resource, json.dumps(body, separators=(",", ":"))),
    )


def last_event(snapshot: ReadSnapshot) -> int:
    row = snapshot.execute("SELECT MAX(id) FROM event").fetchone()
    return row[0] or 0


def events_behind(snapshot: ReadSnapshot, last: int, limit: int) -> list[EventRow]:
    """Return events of all projects with ids above `last`, oldest first."""
    rows = snapshot.execute(
        "SELECT id, project, at, kind, resource, body FROM event WHERE id > ? ORDER BY id LIMIT ?", (last, limit)
    )
    return [EventRow(*row) for row in rows.fetchall()]


def project_events_behind(snapshot: ReadSnapshot, project: int, last: int, limit: int) -> list[EventRow]:
    """Return events of one project with ids above `last`, oldest first."""
    rows = snapshot.execute(
        "SELECT id, project, at, kind, resource, body FROM event WHERE project = ? AND id > ? ORDER BY id LIMIT ?",
        (project, last, limit),
    )
    return [EventRow(*row) for row in rows.fetchall()]


def events_of(snapshot: ReadSnapshot, project: int, resource: str, limit: int) -> list[EventRow]:
    """Return the newest events of one thing, oldest first."""
    rows = snapshot.execute(
        "SELECT id, project, at, kind, resource, body FROM event WHERE resource = ? AND project = ?"
        " ORDER BY id DESC LIMIT ?",
        (resource, project, limit),
    ).fetchall()
    return [EventRow(*row) for row in reversed(rows)]


def drop_events(tx: Transaction, project: int, resource: str, last: int) -> None:
    """Delete the events of one thing up to an id."""
    tx.execute("DELETE FROM event WHERE resource = ? AND project = ? AND id <= ?", (resource, project, last))


def decoded(text: str) -> object:
    """Decode the JSON of an entry."""
    return json.loads(text)
