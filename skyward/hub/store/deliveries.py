"""Rows of deliveries: messages to owners of jobs, from the change that they tell of until they have arrived."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields

from .transaction import ReadSnapshot, Transaction


@dataclass(slots=True, kw_only=True)
class DeliveryRow:
    """Row of `delivery`. The order of the fields is that of the columns."""

    job: int
    id: str
    kind: str
    target: str
    body: str
    created_at: int
    next_at: int | None
    tries: int = 0
    delivered_at: int | None = None
    error: str = ""
    pk: int = 0


_NAMES = tuple(field.name for field in fields(DeliveryRow))
_COLUMNS = ", ".join(_NAMES)


def _row(values: Iterable[object]) -> DeliveryRow:
    return DeliveryRow(**dict(zip(_NAMES, values, strict=True)))  # type: ignore[arg-type]


def add_delivery(tx: Transaction, row: DeliveryRow) -> None:
    names = _NAMES[:-1]
    tx.execute(f"INSERT INTO delivery ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})", astuple(row)[:-1])


def due_deliveries(snapshot: ReadSnapshot, now: int, limit: int) -> list[tuple[DeliveryRow, str]]:
    """Return deliveries whose time has come, with the names of their projects, the longest due first."""
    columns = ", ".join(f"d.{name}" for name in _NAMES)
    rows = snapshot.execute(
        f"SELECT {columns}, p.name FROM delivery d JOIN job j ON j.pk = d.job JOIN project p ON p.id = j.project"
        " WHERE d.next_at <= ? ORDER BY d.next_at, d.pk LIMIT ?",
        (now, limit),
    ).fetchall()
    return [(_row(row[:-1]), str(row[-1])) for row in rows]


def deliveries_of(snapshot: ReadSnapshot, job: int, limit: int) -> list[DeliveryRow]:
    """Return the deliveries of a job, the newest first."""
    rows = snapshot.execute(f"SELECT {_COLUMNS} FROM delivery WHERE job = ? ORDER BY pk DESC LIMIT ?", (job, limit))
    return [_row(row) for row in rows.fetchall()]


def note_try(tx: Transaction, row: DeliveryRow) -> None:
    """Write the outcome of a try."""
    tx.execute(
        "UPDATE delivery SET next_at = ?, tries = ?, delivered_at = ?, error = ? WHERE pk = ?",
        (row.next_at, row.tries, row.delivered_at, row.error, row.pk),
    )
