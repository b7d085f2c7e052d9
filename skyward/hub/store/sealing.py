"""Sealing: points of a run's tail become sorted, compressed chunks, one for each metric.

The expensive half runs on a reader's snapshot, so the writer only inserts and deletes. The rows that were read are then
deleted by number, and the numbers must agree: a second sealer or a cut makes them differ, and the first one wins.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .chunks import Columns, Float64s, Int64s, decode, encode, merge
from .history import unpack
from .keys import batches
from .points import pack_arrays
from .transaction import ReadSnapshot, Transaction

CHUNK_POINTS = 65_536
"""Points of a chunk at most: a reader of a page must not decode a whole history."""

DELETED = 100
"""Chunks that one statement deletes."""

_ADD_CHUNK = (
    "INSERT INTO chunk (run, key, number, points, first_at, last_at, least_step, greatest_step, body)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
Row = tuple[int, int, int, int, int, int, bytes]
"""A chunk without its run and number: key, points, first_at, last_at, least_step, greatest_step, body."""


class Moved(Exception):
    """Somebody else has sealed, merged or cut the same points. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """Chunks that are ready to replace a run's tail."""

    tail: frozenset[int]
    last: int
    chunks: Sequence[Row]


def prepare_seal(snapshot: ReadSnapshot, run: int) -> Sealed | None:
    """Make the chunks of a run's tail. None where the tail is empty."""
    rows = snapshot.execute("SELECT id, points, body FROM tail WHERE run = ? ORDER BY id", (run,)).fetchall()
    if not rows:
        return None
    return Sealed(
        frozenset(row[0] for row in rows), rows[-1][0], _chunks_of([(points, body) for _, points, body in rows])
    )


def apply_seal(tx: Transaction, run: int, sealed: Sealed) -> None:
    """Replace the tail by its chunks.

    Raises:
        Moved: The tail is no longer what was read.
    """
    deleted = tx.execute("DELETE FROM tail WHERE run = ? AND id <= ? RETURNING id", (run, sealed.last)).fetchall()
    # The numbers, not their count: another server may have cut one row, and a third committed one with a lower number.
    if {row[0] for row in deleted} != sealed.tail:
        raise Moved
    _add_chunks(tx, run, sealed.chunks)


@dataclass(frozen=True, slots=True)
class Merged:
    """Chunks of one metric that are ready to replace smaller ones."""

    key: int
    numbers: Sequence[int]
    chunks: Sequence[Row]


def prepare_merge(snapshot: ReadSnapshot, run: int) -> list[Merged]:
    """Join the small chunks of each metric of a run."""
    small: dict[int, list[tuple[int, int, bytes]]] = {}
    for key, number, points, body in snapshot.execute(
        "SELECT key, number, points, body FROM chunk WHERE run = ? AND points < ? ORDER BY key, number",
        (run, CHUNK_POINTS),
    ):
        small.setdefault(key, []).append((number, points, body))
    merged = []
    for key, chunks in small.items():
        if len(chunks) > 1:
            columns = merge([decode(body, points) for _, points, body in chunks])
            merged.append(Merged(key, [number for number, _, _ in chunks], _split(key, columns)))
    return merged


def apply_merge(tx: Transaction, run: int, merged: Sequence[Merged]) -> None:
    """Replace small chunks by larger ones.

    Raises:
        Moved: One of them is gone.
    """
    replaced = [(item.key, number) for item in merged for number in item.numbers]
    for names in batches(replaced, DELETED):
        marks = ", ".join(["(?, ?)"] * len(names))
        sql = f"DELETE FROM chunk WHERE run = ? AND (key, number) IN (VALUES {marks})"
        if tx.execute(sql, (run, *itertools.chain(*names))).rowcount != len(names):
            raise Moved
    _add_chunks(tx, run, [row for item in merged for row in item.chunks])


def cut_points(tx: Transaction, run: int, step: int, only: int | None = None) -> None:
    """Drop all points of a run behind `step`, or those of one key: a resumed training logs them again."""
    _cut_tail(tx, run, step, only)
    of_key, keys = ("", ()) if only is None else (" AND key = ?", (only,))
    rows = tx.execute(
        f"SELECT key, number, points, body FROM chunk WHERE run = ? AND greatest_step > ?{of_key}{tx.for_update}",
        (run, step, *keys),
    ).fetchall()
    kept: list[Row] = []
    for key, number, points, body in rows:
        columns = decode(body, points)
        kept += _split(key, columns.take(columns.steps <= step))
        tx.execute("DELETE FROM chunk WHERE run = ? AND key = ? AND number = ?", (run, key, number))
    _add_chunks(tx, run, kept)
    _lower_latest(tx, run, step, only)


def _cut_tail(tx: Transaction, run: int, step: int, only: int | None) -> None:
    rows = tx.execute(f"SELECT points, body FROM tail WHERE run = ? ORDER BY id{tx.for_update}", (run,)).fetchall()
    if not rows:
        return
    keys, columns = _join(rows)
    chosen = columns.steps <= step
    if only is not None:
        chosen |= keys != only
    # A new row, so that a sealer that has read the old ones finds them gone.
    tx.execute("DELETE FROM tail WHERE run = ?", (run,))
    if chosen.any():
        kept = columns.take(chosen)
        body = pack_arrays(keys[chosen], kept.steps, kept.timestamps, kept.values)
        tx.execute("INSERT INTO tail (run, points, body) VALUES (?, ?, ?)", (run, len(kept), body))


def _lower_latest(tx: Transaction, run: int, step: int, only: int | None) -> None:
    from .history import tail_parts

    for (key,) in tx.execute("SELECT key FROM latest WHERE run = ? AND step > ?", (run, step)).fetchall():
        if only not in (None, key):
            continue
        chunks = tx.execute("SELECT points, body FROM chunk WHERE run = ? AND key = ?", (run, key)).fetchall()
        columns = merge([decode(body, points) for points, body in chunks] + tail_parts(tx, run, key))
        if not len(columns):
            tx.execute("DELETE FROM latest WHERE run = ? AND key = ?", (run, key))
            continue
        last = np.lexsort((np.nan_to_num(columns.values, nan=0.0), columns.timestamps, columns.steps))[-1]
        value = float(columns.values[last])
        tx.execute(
            "UPDATE latest SET step = ?, at = ?, value = ? WHERE run = ? AND key = ?",
            (
                int(columns.steps[last]),
                int(columns.timestamps[last]),
                None if np.isnan(value) else value,
                run,
                key,
            ),
        )


def _join(rows: Sequence[tuple[int, bytes]]) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], Columns]:
    unpacked = [unpack(body, points) for points, body in rows]
    keys = np.concatenate([keys for keys, _ in unpacked])
    timestamps: Int64s = np.concatenate([columns.timestamps for _, columns in unpacked])
    steps: Int64s = np.concatenate([columns.steps for _, columns in unpacked])
    values: Float64s = np.concatenate([columns.values for _, columns in unpacked])
    return keys, Columns(timestamps, steps, values)


def _chunks_of(rows: Sequence[tuple[int, bytes]]) -> list[Row]:
    keys, columns = _join(rows)
    order = np.argsort(keys, kind="stable")
    keys, columns = keys[order], columns.take(order)
    edges = np.flatnonzero(np.diff(keys, prepend=keys[0] - 1))
    ends = [*edges[1:], len(keys)]
    chunks: list[Row] = []
    for first, last in zip(edges, ends, strict=True):
        chunks += _split(int(keys[first]), merge([columns.take(slice(first, last))]))
    return chunks


def _split(key: int, columns: Columns) -> list[Row]:
    rows: list[Row] = []
    for first in range(0, len(columns), CHUNK_POINTS):
        part = columns.take(slice(first, first + CHUNK_POINTS))
        span = (int(part.timestamps[0]), int(part.timestamps[-1]), int(part.steps.min()), int(part.steps.max()))
        rows.append((key, len(part), *span, encode(part)))
    return rows


def _add_chunks(tx: Transaction, run: int, chunks: Sequence[Row]) -> None:
    if not chunks:
        return
    last = tx.execute("SELECT coalesce(max(number), 0) FROM chunk WHERE run = ?", (run,)).fetchone()[0]
    rows = [(run, chunk[0], last + number, *chunk[1:]) for number, chunk in enumerate(chunks, 1)]
    tx.execute_many(_ADD_CHUNK, rows)
