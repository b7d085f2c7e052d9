"""Rows of attempts, and the bytes that they send."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields

from ..model.jobs import Feed
from . import jobs
from .jobs import JobRow
from .transaction import ReadSnapshot, Transaction

PIECE = 1 << 20
"""Bytes of output or items that are read at once."""


@dataclass(slots=True, kw_only=True)
class AttemptRow:
    """Row of `attempt`. The order of the fields is that of the columns."""

    job: int
    number: int
    machines: str
    nodes: str
    waits_for: str = "[]"
    on_loan: bool = False
    reserved_at: int
    launcher: str | None = None
    claimed_at: int | None = None
    token: str | None = None
    heard_at: int | None = None
    began_at: int | None = None
    saved_at: int | None = None
    ends_by: int | None = None
    free_at: int | None = None
    ended_at: int | None = None
    command: str = ""
    command_number: int = 0
    outcome: str = ""
    error: str = ""
    cost: float = 0.0
    output: int = 0
    runner: int | None = None
    kept_until: int | None = None
    idle_cost: float | None = None
    saves: int | None = None
    late_at: int | None = None
    items: int | None = None
    pk: int = 0

    @property
    def node_numbers(self) -> tuple[int, ...]:
        return tuple(int(node) for node in json.loads(self.nodes))

    @property
    def device_numbers(self) -> tuple[int, ...]:
        """Numbers of its devices, the same on each of its nodes; empty where it has whole nodes without any."""
        nodes: list[int] | dict[str, list[int]] = json.loads(self.nodes)
        return tuple(next(iter(nodes.values()))) if isinstance(nodes, dict) else ()

    @property
    def obstacles(self) -> tuple[int, ...]:
        """Numbers (pk) of the attempts that must end first."""
        return tuple(json.loads(self.waits_for))

    def size_of(self, feed: Feed) -> int:
        """Return how many bytes of a feed have arrived."""
        return (self.output if feed == "output" else self.items) or 0

    def order(self, command: str) -> None:
        """Give its runner a command, which it collects with its next message."""
        self.command = command
        self.command_number += 1


_NAMES = tuple(field.name for field in fields(AttemptRow))
_COLUMNS = ", ".join(f"a.{name}" for name in _NAMES)
_GIVEN = _NAMES[:-1]
_CHANGING = _NAMES[_NAMES.index("waits_for") : _NAMES.index("pk")]


def _row(values: Iterable[object]) -> AttemptRow:
    row = AttemptRow(**dict(zip(_NAMES, values, strict=True)))  # type: ignore[arg-type]
    row.on_loan = bool(row.on_loan)  # SQLite has integers
    return row


def add_attempt(tx: Transaction, row: AttemptRow) -> None:
    """Add an attempt, and give it its number."""
    made = tx.execute(
        f"INSERT INTO attempt ({', '.join(_GIVEN)}) VALUES ({', '.join('?' * len(_GIVEN))}) RETURNING pk",
        astuple(row)[:-1],
    ).fetchone()
    row.pk = int(made[0])


def update_attempt(tx: Transaction, row: AttemptRow) -> None:
    """Write the columns that change."""
    changes = ", ".join(f"{name} = ?" for name in _CHANGING)
    tx.execute(f"UPDATE attempt SET {changes} WHERE pk = ?", (*(getattr(row, name) for name in _CHANGING), row.pk))


def delete_attempt(tx: Transaction, pk: int) -> None:
    """Delete an attempt that has sent nothing."""
    tx.execute("DELETE FROM attempt WHERE pk = ?", (pk,))


def attempts_of(snapshot: ReadSnapshot, job: int) -> list[AttemptRow]:
    """Return the attempts of a job, the first one first."""
    rows = snapshot.execute(f"SELECT {_COLUMNS} FROM attempt a WHERE a.job = ? ORDER BY a.number", (job,)).fetchall()
    return [_row(row) for row in rows]


def find_attempt(snapshot: ReadSnapshot, job: int, number: int) -> AttemptRow | None:
    row = snapshot.execute(
        f"SELECT {_COLUMNS} FROM attempt a WHERE a.job = ? AND a.number = ?", (job, number)
    ).fetchone()
    return _row(row) if row else None


def last_saves(snapshot: ReadSnapshot, jobs: Sequence[int]) -> dict[int, int]:
    """Return job -> time of its last checkpoint, of those that have one."""
    if not jobs:
        return {}
    rows = snapshot.execute(
        "SELECT a.job, max(a.saved_at) FROM attempt a WHERE a.saved_at IS NOT NULL"
        f" AND a.job IN ({', '.join('?' * len(jobs))}) GROUP BY a.job",
        tuple(jobs),
    ).fetchall()
    return {int(job): int(at) for job, at in rows}


def active_attempt(snapshot: ReadSnapshot, job: int) -> AttemptRow | None:
    """Return the attempt of a job that holds machines."""
    row = snapshot.execute(
        f"SELECT {_COLUMNS} FROM attempt a WHERE a.job = ? AND a.ended_at IS NULL", (job,)
    ).fetchone()
    return _row(row) if row else None


def active_attempts(snapshot: ReadSnapshot, *, for_update: str = "") -> list[tuple[JobRow, AttemptRow]]:
    """Return the attempts that hold machines, of all projects, with their jobs.

    `for_update` is that of a transaction that is about to change them.
    """
    return _with_jobs(snapshot, "a.ended_at IS NULL", for_update)


def kept_attempts(snapshot: ReadSnapshot, *, for_update: str = "") -> list[tuple[JobRow, AttemptRow]]:
    """Return the ended attempts whose runners and machines wait for the next one, with their jobs."""
    return _with_jobs(snapshot, "a.kept_until IS NOT NULL", for_update)


def attempt_numbered(snapshot: ReadSnapshot, pk: int) -> tuple[JobRow, AttemptRow] | None:
    """Return an attempt by its number in the table, with its job."""
    return next(iter(_with_jobs(snapshot, f"a.pk = {pk:d}", "")), None)


def job_of_token(snapshot: ReadSnapshot, token: str) -> JobRow | None:
    """Return the job whose runner has a token; None if the token is of no attempt that holds machines."""
    row = snapshot.execute(
        f"SELECT {jobs.columns()} FROM attempt a JOIN job j ON j.pk = a.job WHERE a.ended_at IS NULL AND a.token = ?",
        (token,),
    ).fetchone()
    return jobs.row_of(row) if row else None


def attempt_served(snapshot: ReadSnapshot, runner: int) -> tuple[JobRow, AttemptRow] | None:
    """Return the active attempt that a kept runner serves, with its job."""
    return next(iter(_with_jobs(snapshot, f"a.ended_at IS NULL AND a.runner = {runner:d}", "")), None)


def has_runner(snapshot: ReadSnapshot, job: int) -> bool:
    """Return whether a runner that was started for a job waits, or serves another one."""
    row = snapshot.execute(
        "SELECT 1 FROM attempt a WHERE a.job = ? AND (a.kept_until IS NOT NULL OR EXISTS"
        " (SELECT 1 FROM attempt served WHERE served.ended_at IS NULL AND served.runner = a.pk)) LIMIT 1",
        (job,),
    ).fetchone()
    return row is not None


def _with_jobs(snapshot: ReadSnapshot, condition: str, for_update: str) -> list[tuple[JobRow, AttemptRow]]:
    rows = snapshot.execute(
        f"SELECT {jobs.columns()}, {_COLUMNS} FROM attempt a JOIN job j ON j.pk = a.job WHERE {condition}"
        f" ORDER BY j.pk{for_update}"
    ).fetchall()
    width = jobs.count_columns()
    return [(jobs.row_of(row[:width]), _row(row[width:])) for row in rows]


# Feeds ----------------------------------------------------------------------------------------------------------------


def add_to_feed(tx: Transaction, row: AttemptRow, feed: Feed, start: int, body: bytes) -> None:
    """Add bytes that begin at `start`. Bytes that are here already are dropped: the runner sends again."""
    size = row.size_of(feed)
    if fresh := body[size - start :]:
        tx.execute(f"INSERT INTO job_{feed} (attempt, start, body) VALUES (?, ?, ?)", (row.pk, size, fresh))
        setattr(row, feed, size + len(fresh))


def read_feed(snapshot: ReadSnapshot, attempt: int, feed: Feed, start: int) -> bytes:
    """Return bytes from `start` on, about `PIECE` at most; empty if there are none yet."""
    rows: Sequence[tuple[int, bytes]] = snapshot.execute(
        f"SELECT start, body FROM job_{feed} WHERE attempt = ? AND start >= coalesce((SELECT max(start)"
        f" FROM job_{feed} WHERE attempt = ? AND start <= ?), 0) AND start < ? ORDER BY start LIMIT 256",
        (attempt, attempt, start, start + PIECE),  # rows follow each other without gaps, and may be as large as this
    ).fetchall()
    pieces, size = [], 0
    for begin, body in rows:
        piece = bytes(body)[max(0, start - begin) :]
        if size and size + len(piece) > PIECE:
            break
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)
