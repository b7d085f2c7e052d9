"""Histories of metrics: sealed chunks and the tail of a run, read as columns."""

from __future__ import annotations

import itertools
import math
from array import array

import numpy as np

from ..model.points import History
from .chunks import Columns, Float64s, Int64s, decode, merge, value_keys
from .keys import find_key
from .points import POINT_BYTES
from .transaction import ReadSnapshot

LEAST, GREATEST = -(2**63), 2**63 - 1
Position = tuple[int, int, float]
"""Timestamp, step and value of a point: where a page ended."""


def read_history(
    snapshot: ReadSnapshot,
    project: int,
    run: int,
    name: str,
    *,
    start: int | None = None,
    end: int | None = None,
    after: Position | None = None,
    limit: int | None = None,
    at_most: int | None = None,
) -> tuple[History, Position | None]:
    """Read points of one metric, and the position where the page ends if more follow.

    Args:
        snapshot: Where to read.
        project: Project of the run.
        run: Number of the run.
        name: Name of the metric. One that the run lacks has no points.
        start: Least step, inclusive.
        end: Greatest step, inclusive.
        after: Where the page before ended.
        limit: Points on a page.
        at_most: Points of the whole answer, thinned by the least and the greatest of each stretch.
    """
    key = find_key(snapshot, project, name)
    if key is None:
        return History(name), None
    least, greatest = LEAST if start is None else start, GREATEST if end is None else end
    parts = _sealed(snapshot, run, key, least, greatest, after[0] if after else LEAST)
    parts += tail_parts(snapshot, run, key)
    columns = merge(parts)
    if start is not None or end is not None:
        columns = columns.take((columns.steps >= least) & (columns.steps <= greatest))
    if after is not None:
        columns = columns.take(slice(_first_after(columns, after), None))
    position = None
    if limit is not None and len(columns) > limit:
        columns = columns.take(slice(limit))
        last = limit - 1
        position = (int(columns.timestamps[last]), int(columns.steps[last]), float(columns.values[last]))
    if at_most is not None:
        columns = thin(columns, at_most)
    return _history(name, columns), position


def tail_parts(snapshot: ReadSnapshot, run: int, key: int) -> list[Columns]:
    """Return the points of a metric that are not sealed yet."""
    parts = []
    for points, body in snapshot.execute("SELECT points, body FROM tail WHERE run = ? ORDER BY id", (run,)):
        keys, columns = unpack(body, points)
        chosen = keys == key
        if chosen.all():
            parts.append(columns)
        elif chosen.any():
            parts.append(columns.take(chosen))
    return parts


def unpack(body: bytes, points: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], Columns]:
    """Unpack a body of `tail` into key ids and columns."""
    assert len(body) == points * POINT_BYTES, "a body has other points than its row says"
    keys = np.frombuffer(body, "<i4", points)
    words = np.frombuffer(body, np.uint8, points * 24, points * 4)
    steps: Int64s = words[: points * 8].view("<i8")
    timestamps: Int64s = words[points * 8 : points * 16].view("<i8")
    values: Float64s = words[points * 16 :].view("<f8")
    return keys, Columns(timestamps, steps, values)


def thin(columns: Columns, at_most: int) -> Columns:
    """Keep the first and last point, and the least and greatest value of each stretch between them.

    A curve that is drawn from the rest looks the same: no peak is lost, which a mean or every n-th point would lose.

    Args:
        columns: Points.
        at_most: Points to keep, at least 4.
    """
    count = len(columns)
    stretches = (max(at_most, 4) - 2) // 2
    if count <= max(at_most, 4):
        return columns
    order = np.argsort(columns.steps, kind="stable")  # curves are drawn over steps; retries may arrive late
    ordered = columns.take(order)
    edges = np.linspace(1, count - 1, stretches + 1).astype(np.intp)
    kept = np.zeros(count, np.bool_)
    kept[[0, -1]] = True
    low = np.where(np.isnan(ordered.values), np.inf, ordered.values)
    high = np.where(np.isnan(ordered.values), -np.inf, ordered.values)
    for first, last in itertools.pairwise(edges):
        kept[first + np.argmin(low[first:last])] = True
        kept[first + np.argmax(high[first:last])] = True
    return columns.take(np.sort(order[kept]))


def _sealed(snapshot: ReadSnapshot, run: int, key: int, least: int, greatest: int, since: int) -> list[Columns]:
    rows = snapshot.execute(
        "SELECT points, body FROM chunk WHERE run = ? AND key = ? AND greatest_step >= ? AND least_step <= ?"
        " AND last_at >= ? ORDER BY number",
        (run, key, least, greatest, since),
    )
    return [decode(body, points) for points, body in rows]


def _first_after(columns: Columns, position: Position) -> int:
    """Return the index of the first point that `merge` sorts behind `position`."""
    at, step, value = position
    low = int(np.searchsorted(columns.timestamps, at, "left"))
    high = int(np.searchsorted(columns.timestamps, at, "right"))
    same_time = columns.take(slice(low, high))
    first = low + int(np.searchsorted(same_time.steps, step, "left"))
    last = low + int(np.searchsorted(same_time.steps, step, "right"))
    same_step = columns.values[first:last]
    is_nan, numbers = value_keys(same_step)
    number = 0.0 if math.isnan(value) else value
    is_before = (numbers < number) | ((numbers == number) & (is_nan <= math.isnan(value)))
    return first + int(np.count_nonzero(is_before))


def _history(name: str, columns: Columns) -> History:
    history = History(name, array("q"), array("q"), array("d"))
    history.steps.frombytes(np.ascontiguousarray(columns.steps, np.int64).data.cast("B"))
    history.timestamps.frombytes(np.ascontiguousarray(columns.timestamps, np.int64).data.cast("B"))
    history.values.frombytes(np.ascontiguousarray(columns.values, np.float64).data.cast("B"))
    return history
