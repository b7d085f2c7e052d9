"""Integers for the names of metrics, parameters and tags of a project."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import TypeVar

from .transaction import ReadSnapshot, Transaction

T = TypeVar("T")

BATCH = 500
"""Names in one query."""


def key_ids(tx: Transaction, project: int, names: Collection[str]) -> dict[str, int]:
    """Return the id of each name. Names that are new to the project become keys."""
    cache, new = tx.keys, tx.new_keys
    ids: dict[str, int] = {}
    missing: list[str] = []
    for name in names:
        number = cache.get(project, name) or new.get((project, name))
        if number is None:
            missing.append(name)
        else:
            ids[name] = number
    if missing:
        _make(tx, project, sorted(missing), ids)  # sorted: two servers that make the same ones must not deadlock
    return ids


def find_key(snapshot: ReadSnapshot, project: int, name: str) -> int | None:
    """Return the id of a name, None where the project has no such key."""
    row = snapshot.execute("SELECT id FROM key WHERE project = ? AND name = ?", (project, name)).fetchone()
    return row[0] if row else None


def _make(tx: Transaction, project: int, missing: list[str], ids: dict[str, int]) -> None:
    found = _find(tx, project, missing)
    absent = [name for name in missing if name not in found]
    if absent:
        tx.execute_many(
            "INSERT INTO key (project, name) VALUES (?, ?) ON CONFLICT DO NOTHING", [(project, name) for name in absent]
        )
        found.update(_find(tx, project, absent))
    ids.update(found)
    if not tx.new_keys:
        tx.after_commit(partial(_remember, tx))
    tx.new_keys.update({(project, name): number for name, number in found.items()})


def _find(tx: Transaction, project: int, names: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for batch in batches(names):
        marks = ", ".join("?" * len(batch))
        sql = f"SELECT name, id FROM key WHERE project = ? AND name IN ({marks})"
        found.update(tx.execute(sql, (project, *batch)).fetchall())
    return found


def batches(names: Sequence[T], size: int = BATCH) -> Iterable[Sequence[T]]:
    """Split names or numbers into lists that one query takes."""
    for start in range(0, len(names), size):
        yield names[start : start + size]


def _remember(tx: Transaction) -> None:
    tx.keys.add(tx.new_keys)
