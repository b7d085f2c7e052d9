"""Points on their way in: one row of `tail` for each request, and the latest value of each metric.

A body of `tail` holds n points as columns, little-endian: n key ids (int32), n steps (int64), n timestamps (int64) and
n values (float64). A row for each point was measured and rejected: it costs four times the CPU and the bytes.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ..model.points import PointColumns
from .keys import key_ids
from .transaction import Transaction

POINT_BYTES = 4 + 8 + 8 + 8
GREATEST = sys.float_info.max
"""Infinities are stored as this, with their sign, as MLflow does."""

_ADD_TAIL = "INSERT INTO tail (run, points, body) VALUES (?, ?, ?)"
_ADD_TAILS = "INSERT INTO tail (run, points, body) SELECT * FROM unnest(%b::int8[], %b::int4[], %b::bytea[])"
_RAISE_LATEST = """
    ON CONFLICT (run, key) DO UPDATE SET step = excluded.step, at = excluded.at, value = excluded.value
    WHERE (excluded.step, excluded.at, coalesce(excluded.value, 0))
        > (latest.step, latest.at, coalesce(latest.value, 0))
"""
_SET_LATEST = f"INSERT INTO latest (run, key, step, at, value) VALUES (?, ?, ?, ?, ?) {_RAISE_LATEST}"
_SET_LATESTS = f"""
    INSERT INTO latest (run, key, step, at, value)
    SELECT * FROM unnest(%b::int8[], %b::int8[], %b::int8[], %b::int8[], %b::float8[]) {_RAISE_LATEST}
"""

Latest = dict[tuple[int, int], tuple[int, int, float]]

MANY = 64
"""Points of a request from which arrays are faster than a loop: 25 us instead of 180 us for 1,000 points."""


def append(tx: Transaction, project: int, run: int, columns: PointColumns) -> None:
    """Log points of a run. They are written with those of the commit's other operations, see `flush_points`."""
    if len(columns):
        tx.points.append((project, run, columns))


def has_points(tx: Transaction, run: int) -> bool:
    """Report whether a run has points, logged by this transaction or before."""
    if run in tx.runs_with_points or any(logged[1] == run for logged in tx.points):
        return True
    found = tx.execute("SELECT 1 FROM latest WHERE run = ? LIMIT 1", (run,)).fetchone() is not None
    if found:
        tx.runs_with_points.add(run)
    return found


def flush_points(tx: Transaction) -> None:
    """Write the points that operations have logged so far. The writer does it before each commit."""
    if not tx.points:
        return
    logged, tx.points = tx.points, []
    rows: list[tuple[int, int, bytes]] = []
    latest: Latest = {}
    for project, run, columns in logged:
        ids = key_ids(tx, project, set(columns.keys))
        keys = array("i", map(ids.__getitem__, columns.keys))
        _bound(columns.values)
        for key, step, at, value in _candidates(keys, columns):
            _raise(latest, (run, key), (step, at, value))
        rows.append((run, len(keys), pack(keys, columns.steps, columns.timestamps, columns.values)))
    if tx.is_postgresql:
        tails = [list(column) for column in zip(*rows, strict=True)]
        tx.execute_at_once((_ADD_TAILS, tails), (_SET_LATESTS, _transpose(latest)))
    else:
        tx.execute_many(_ADD_TAIL, rows)
        tx.execute_many(_SET_LATEST, [(*names, *_storable(point)) for names, point in latest.items()])
    for run, points, _ in rows:
        total, keys_of_run = tx.logged.get(run, (0, set()))
        tx.logged[run] = (total + points, keys_of_run)
    for run, key in latest:
        tx.logged[run][1].add(key)


def pack_arrays(
    keys: npt.NDArray[np.int32],
    steps: npt.NDArray[np.int64],
    timestamps: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
) -> bytes:
    """Pack arrays into a body of `tail`."""
    columns = (keys.astype("<i4"), steps.astype("<i8"), timestamps.astype("<i8"), values.astype("<f8"))
    return b"".join(column.tobytes() for column in columns)


def pack(keys: array[int], steps: array[int], timestamps: array[int], values: array[float]) -> bytes:
    """Pack columns into a body of `tail`."""
    columns = (keys, steps, timestamps, values)
    if sys.byteorder == "big":
        columns = tuple(array(column.typecode, column) for column in columns)  # type: ignore[assignment]
        for column in columns:
            column.byteswap()
    return b"".join(column.tobytes() for column in columns)


def _bound(values: array[float]) -> None:
    if len(values) >= MANY:
        numbers = np.frombuffer(values)
        np.clip(numbers, -GREATEST, GREATEST, out=numbers)
        return
    for position, value in enumerate(values):
        if math.isinf(value):
            values[position] = math.copysign(GREATEST, value)


def _candidates(keys: array[int], columns: PointColumns) -> Iterable[tuple[int, int, int, float]]:
    """Return points (key, step, at, value) among which are the latest of all metrics: of many points, these alone."""
    if len(keys) < MANY:
        return zip(keys, columns.steps, columns.timestamps, columns.values, strict=True)
    # Backwards: of equal points (0, -0 and NaN are equal), the first one stays, as in the loop and in the database.
    names, values = np.frombuffer(keys, np.intc)[::-1], np.frombuffer(columns.values)[::-1]
    steps, times = np.frombuffer(columns.steps, np.int64)[::-1], np.frombuffer(columns.timestamps, np.int64)[::-1]
    order = np.lexsort((np.where(np.isnan(values), 0.0, values), times, steps, names))
    latest = order[np.append(np.diff(names[order]) != 0, True)]
    return zip(*(column[latest].tolist() for column in (names, steps, times, values)), strict=True)


def _raise(latest: Latest, names: tuple[int, int], point: tuple[int, int, float]) -> None:
    best = latest.get(names)
    step, at, value = point
    if best is None or step > best[0] or (step == best[0] and _is_later(at, value, best)):
        latest[names] = point


def _is_later(at: int, value: float, best: tuple[int, int, float]) -> bool:
    """Compare points of one step. NaN counts as 0, as in MLflow."""
    best_at, best_value = best[1:]
    return (at, 0.0 if math.isnan(value) else value) > (best_at, 0.0 if math.isnan(best_value) else best_value)


def _storable(point: tuple[int, int, float]) -> tuple[int, int, float | None]:
    step, at, value = point
    return step, at, None if math.isnan(value) else value


def _transpose(latest: Latest) -> list[list[object]]:
    """Columns of `latest`, sorted: two servers that lock the same rows must lock them in the same order."""
    rows = [(*names, *_storable(latest[names])) for names in sorted(latest)]
    return [list(column) for column in zip(*rows, strict=True)]
