"""Rows of pools and their events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from ..model.pools import PoolEvent
from .tables import OF_CALL, OF_REST
from .transaction import ReadSnapshot, Transaction

CALL = "call"
_COLUMNS = (
    'id, name, provider, "user", nodes, started_at, heard_at, cost_at, client, state, ready_at, ended_at, reason,'
    ' price, spent, calls, failed, lost, replaced, "last", pk'
)


@dataclass(slots=True)
class PoolRow:
    """Row of `pool`."""

    id: str
    name: str
    provider: str
    user: str
    nodes: int
    started_at: int
    heard_at: int
    cost_at: int
    client: str
    state: str = "starting"
    ready_at: int | None = None
    ended_at: int | None = None
    reason: str = ""
    price: float = 0.0
    spent: float = 0.0
    calls: int = 0
    failed: int = 0
    lost: int = 0
    replaced: int = 0
    last: int = 0
    pk: int = 0


def find_pool(snapshot: ReadSnapshot, project: int, pool_id: str) -> PoolRow | None:
    row = snapshot.execute(f"SELECT {_COLUMNS} FROM pool WHERE project = ? AND id = ?", (project, pool_id)).fetchone()
    return PoolRow(*row) if row else None


def add_pool(tx: Transaction, project: int, row: PoolRow) -> bool:
    """Add a pool. Return False where its id is taken."""
    made = tx.execute(
        f"INSERT INTO pool (project, {_COLUMNS.removesuffix(', pk')}) VALUES ({', '.join('?' * 21)})"
        " ON CONFLICT DO NOTHING RETURNING pk",
        (project, *astuple(row)[:-1]),
    ).fetchone()
    if made is None:
        return False
    row.pk = int(made[0])
    return True


def update_pool(tx: Transaction, row: PoolRow) -> None:
    """Write the columns that events change."""
    tx.execute(
        "UPDATE pool SET state = ?, ready_at = ?, ended_at = ?, heard_at = ?, reason = ?, price = ?, spent = ?,"
        ' cost_at = ?, calls = ?, failed = ?, lost = ?, replaced = ?, "last" = ? WHERE pk = ?',
        (
            *(row.state, row.ready_at, row.ended_at, row.heard_at, row.reason, row.price, row.spent),
            *(row.cost_at, row.calls, row.failed, row.lost, row.replaced, row.last, row.pk),
        ),
    )


def pools_before(snapshot: ReadSnapshot, project: int, limit: int, before: tuple[int, int] | None) -> list[PoolRow]:
    """Return pools of a project, the newest first, from behind (start, pk)."""
    started_at, pk = before or (2**62, 2**62)
    rows = snapshot.execute(
        f"SELECT {_COLUMNS} FROM pool WHERE project = ? AND (started_at, pk) < (?, ?)"
        " ORDER BY started_at DESC, pk DESC LIMIT ?",
        (project, started_at, pk, limit),
    ).fetchall()
    return [PoolRow(*row) for row in rows]


def add_events(tx: Transaction, pool: int, rows: Sequence[tuple[int, int, str, int | None, Mapping[str, Any]]]) -> None:
    """Add events: number, time, kind, node and fields of each."""
    if rows:
        tx.execute_many(
            'INSERT INTO pool_event (pool, number, "at", kind, node, body) VALUES (?, ?, ?, ?, ?, ?)',
            [(pool, number, at, kind, node, json.dumps(dict(body))) for number, at, kind, node, body in rows],
        )


def events_of(snapshot: ReadSnapshot, pool: int, limit: int) -> list[PoolEvent]:
    """Return the events of a pool that are about no call, the first ones."""
    rows = snapshot.execute(
        f'SELECT number, "at", kind, node, body FROM pool_event WHERE pool = ? AND {OF_REST} ORDER BY number LIMIT ?',
        (pool, limit),
    ).fetchall()
    return [PoolEvent(row[0], row[1], row[2], row[3], json.loads(row[4])) for row in rows]


def calls_of(snapshot: ReadSnapshot, pool: int, limit: int) -> list[PoolEvent]:
    """Return the last events of a pool about calls, in their order."""
    rows = snapshot.execute(
        f'SELECT number, "at", kind, node, body FROM pool_event WHERE pool = ? AND {OF_CALL}'
        " ORDER BY number DESC LIMIT ?",
        (pool, limit),
    ).fetchall()
    return [PoolEvent(row[0], row[1], row[2], row[3], json.loads(row[4])) for row in reversed(rows)]
