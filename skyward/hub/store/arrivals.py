"""Points that any server has committed lately, read from the tails: with PostgreSQL, pages watch one server of several.

Rows are numbered when they are written and appear when they are committed, so a lower number may come later. Numbers
of the last few seconds are therefore looked at again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..model.points import PointColumns
from .history import unpack
from .transaction import ReadSnapshot

SETTLE_S = 5.0
"""Seconds after which a number that has not appeared is taken for one of a transaction that failed."""
ROWS = 200
"""Rows that are unpacked at once."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Points of one request.

    Attributes:
        project: Number of their project.
        experiment: Number of their experiment.
        run: Id of their run.
    """

    project: int
    experiment: int
    run: str
    columns: PointColumns


Wants = Callable[[int, int, str], bool]
"""`wants(project, experiment, run)`: whether anybody watches this run."""


class Arrivals:
    """Follows the tails of all runs. Each call is one read of the database; one at a time.

    Rows that were sealed before they were read are not seen. That concerns runs with more than 32,000 points a second;
    their pages read the rest from the chunks.
    """

    def __init__(self) -> None:
        self._floor: int | None = None
        self._seen: set[int] = set()
        self._ends: deque[tuple[float, int]] = deque()

    def reset(self) -> None:
        """Stop following. The next `begin` starts at the end."""
        self._floor = None
        self._seen.clear()
        self._ends.clear()

    def begin(self, snapshot: ReadSnapshot) -> None:
        """Start behind the points that are there, unless it has started."""
        if self._floor is None:
            ids = [row[0] for row in snapshot.execute("SELECT id FROM tail ORDER BY id DESC LIMIT 1000").fetchall()]
            # One that was numbered before the newest may still be on its way.
            self._floor = ids[-1] if len(ids) == 1000 else 0
            self._seen.update(ids)
            self._ends.append((time.monotonic(), max(ids, default=0)))

    def read(self, snapshot: ReadSnapshot, wants: Wants) -> list[Arrival]:
        """Return points that came since the last call."""
        self.begin(snapshot)
        rows = snapshot.execute(
            "SELECT tail.id, run.project, run.experiment, run.id FROM tail JOIN run ON run.pk = tail.run"
            " WHERE tail.id > ? ORDER BY tail.id",
            (self._floor,),
        ).fetchall()
        new = [row for row in rows if row[0] not in self._seen]
        arrivals: list[Arrival] = []
        wanted = {number: (project, experiment, run) for number, project, experiment, run in new
                  if wants(project, experiment, run)}  # fmt: skip
        numbers = sorted(wanted)
        for start in range(0, len(numbers), ROWS):
            bodies = _unpacked(snapshot, numbers[start : start + ROWS])
            arrivals += [Arrival(*wanted[number], columns) for number, columns in bodies]
        self._settle([row[0] for row in new])
        return arrivals

    def _settle(self, new: list[int]) -> None:
        self._seen.update(new)
        now = time.monotonic()
        if new:
            self._ends.append((now, new[-1]))
        while self._ends and self._ends[0][0] < now - SETTLE_S:
            self._floor = max(self._floor or 0, self._ends.popleft()[1])
        self._seen = {number for number in self._seen if number > (self._floor or 0)}


def _unpacked(snapshot: ReadSnapshot, numbers: list[int]) -> list[tuple[int, PointColumns]]:
    marks = ", ".join("?" * len(numbers))
    rows = snapshot.execute(f"SELECT id, points, body FROM tail WHERE id IN ({marks}) ORDER BY id", numbers).fetchall()
    parts = [(number, *unpack(body, points)) for number, points, body in rows]
    ids = sorted({int(key) for _, keys, _ in parts for key in set(keys.tolist())})
    names: dict[int, str] = {}
    for start in range(0, len(ids), ROWS):
        batch = ids[start : start + ROWS]
        marks = ", ".join("?" * len(batch))
        names.update(snapshot.execute(f"SELECT id, name FROM key WHERE id IN ({marks})", batch).fetchall())
    unpacked = []
    for number, keys, columns in parts:
        points = PointColumns([names[key] for key in keys.tolist()])
        points.steps.extend(columns.steps.tolist())
        points.timestamps.extend(columns.timestamps.tolist())
        points.values.extend(columns.values.tolist())
        unpacked.append((number, points))
    return unpacked
