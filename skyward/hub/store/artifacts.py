"""Rows of artifacts, blobs, batches and commands."""

from __future__ import annotations

from ..model.quotas import Quota
from ..model.runs import Artifact, Command
from . import quotas
from .transaction import ReadSnapshot, Transaction


def find_artifact(snapshot: ReadSnapshot, run: int, key: str) -> Artifact | None:
    row = snapshot.execute("SELECT key, size, sha256 FROM artifact WHERE run = ? AND key = ?", (run, key)).fetchone()
    return Artifact(*row) if row else None


def set_artifact(tx: Transaction, run: int, artifact: Artifact) -> None:
    """Add an artifact, or replace the one of this key."""
    tx.execute(
        "INSERT INTO artifact (run, key, size, sha256, created_at) VALUES (?, ?, ?, ?, ?) ON CONFLICT (run, key)"
        " DO UPDATE SET size = excluded.size, sha256 = excluded.sha256, created_at = excluded.created_at",
        (run, artifact.key, artifact.size, artifact.sha256, tx.now),
    )


def delete_artifacts(tx: Transaction, run: int, key: str) -> int:
    """Delete an artifact, or all below a folder. Returns how many there were."""
    first, end = _below(key)
    deleted: int = tx.execute(
        "DELETE FROM artifact WHERE run = ? AND (key = ? OR (key >= ? AND key < ?))", (run, key, first, end)
    ).rowcount
    return deleted


def list_artifacts(snapshot: ReadSnapshot, run: int, prefix: str) -> list[Artifact]:
    """List what lies directly in a folder of a run. Folders have the size 0."""
    condition, values = "", ()
    if prefix:
        condition, values = " AND key >= ? AND key < ?", _below(prefix)  # type: ignore[assignment]
    start = len(prefix) + 1 if prefix else 0
    found: dict[str, Artifact] = {}
    for key, size, sha256 in snapshot.execute(
        f"SELECT key, size, sha256 FROM artifact WHERE run = ?{condition}", (run, *values)
    ):
        name, slash, _ = key[start:].partition("/")
        path = key[:start] + name
        found[path] = Artifact(path, 0, "", is_directory=True) if slash else Artifact(key, size, sha256)
    return [found[path] for path in sorted(found)]


def has_blob(snapshot: ReadSnapshot, project: int, sha256: str, size: int) -> bool:
    """Report whether a project has uploaded these bytes."""
    return (
        snapshot.execute(
            "SELECT 1 FROM blob WHERE project = ? AND sha256 = ? AND size = ?", (project, sha256, size)
        ).fetchone()
        is not None
    )


def knows_blob(snapshot: ReadSnapshot, project: int, sha256: str) -> bool:
    """Report whether a project has bytes of this hash."""
    row = snapshot.execute("SELECT 1 FROM blob WHERE project = ? AND sha256 = ?", (project, sha256)).fetchone()
    return row is not None


def add_blob(tx: Transaction, project: int, sha256: str, size: int) -> None:
    """Note that a project has these bytes. A known blob becomes young again, so that retention does not take it.

    Raises:
        Refusal: The project has no room for them.
    """
    row = tx.execute(
        "INSERT INTO blob (project, sha256, size, created_at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING 1",
        (project, sha256, size, tx.now),
    ).fetchone()
    if row is not None:
        quotas.charge(tx, project, Quota.ARTIFACT_BYTES, size)
    else:
        tx.execute("UPDATE blob SET created_at = ? WHERE project = ? AND sha256 = ?", (tx.now, project, sha256))


def last_accepted(tx: Transaction, run: int, client: str) -> int:
    """Return the number of the last record accepted from a client, and keep other servers from accepting more."""
    tx.execute("INSERT INTO batch (run, client, last) VALUES (?, ?, 0) ON CONFLICT DO NOTHING", (run, client))
    row = tx.execute(f"SELECT last FROM batch WHERE run = ? AND client = ?{tx.for_update}", (run, client)).fetchone()
    return int(row[0])


def set_last_accepted(tx: Transaction, run: int, client: str, last: int) -> None:
    tx.execute("UPDATE batch SET last = ? WHERE run = ? AND client = ?", (last, run, client))


def add_command(tx: Transaction, run: int, action: str) -> Command:
    """Add a command with the next number of its run. The run's row keeps other servers from taking the same one."""
    tx.execute(f"SELECT pk FROM run WHERE pk = ?{tx.for_update}", (run,)).fetchone()
    row = tx.execute("SELECT coalesce(max(number), 0) + 1 FROM command WHERE run = ?", (run,)).fetchone()
    tx.execute(
        "INSERT INTO command (run, number, action, created_at) VALUES (?, ?, ?, ?)", (run, row[0], action, tx.now)
    )
    return Command(row[0], action, tx.now)


def load_commands(snapshot: ReadSnapshot, run: int, *, only_open: bool = False) -> list[Command]:
    condition = " AND acknowledged_at IS NULL" if only_open else ""
    rows = snapshot.execute(
        f"SELECT number, action, created_at, acknowledged_at, result FROM command WHERE run = ?{condition}"
        " ORDER BY number",
        (run,),
    )
    return [Command(*row) for row in rows]


def acknowledge_command(tx: Transaction, run: int, number: int, result: str | None) -> None:
    tx.execute(
        "UPDATE command SET acknowledged_at = ?, result = ? WHERE run = ? AND number = ? AND acknowledged_at IS NULL",
        (tx.now, result, run, number),
    )


def _below(folder: str) -> tuple[str, str]:
    """Return the range of keys below a folder: `0` is the character after `/`."""
    return f"{folder}/", f"{folder}0"
