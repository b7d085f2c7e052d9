"""Live events: changes from the outbox, and points as they are logged, for the pages that watch."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..model.access import Actor, Right
from ..model.points import PointColumns
from ..model.refusal import Refusal
from ..store import journal
from ..store.arrivals import Arrivals
from .calls import need_experiment, need_run
from .tracking import Tracking

if TYPE_CHECKING:
    from ..store.database import Database
    from ..store.runs import RunRow
    from ..store.transaction import Transaction

_log = logging.getLogger(__name__)

PERIOD_S = 0.25
"""Seconds between two deliveries of points, and between two looks into the outbox."""
PAGE = 200
MOST_POINTS = 50_000
"""Points of one delivery. A slow reader loses the oldest beyond it, and reads them from the store."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One message of the stream.

    Attributes:
        id: Number of the event. None for points, which are not in the outbox.
        kind: `points`, or the kind of an event.
        body: Value that JSON can hold.
    """

    id: int | None
    kind: str
    body: Any


def noun_of(kind: str) -> str:
    """Return the noun of the kind of an event.

    Example:
        >>> noun_of("job.running"), noun_of("points")
        ('job', 'points')
    """
    return kind.partition(".")[0]


class EventWatcher:
    """One reader of the stream. Points wait in it until it asks."""

    def __init__(self, project: int, run: str | None, experiment: int | None, kinds: Collection[str] = ()) -> None:
        self.project, self.run, self.experiment, self.kinds = project, run, experiment, frozenset(kinds)
        self._lock = threading.Lock()
        self._points: dict[str, PointColumns] = {}

    def wants(self, project: int, experiment: int, run: str) -> bool:
        return (
            project == self.project
            and self.run in (None, run)
            and self.experiment in (None, experiment)
            and self.wants_kind("points")
        )

    def wants_kind(self, kind: str) -> bool:
        """Return whether it wants events of a kind, such as `job.running`."""
        return not self.kinds or noun_of(kind) in self.kinds

    def add(self, run: str, columns: PointColumns) -> None:
        with self._lock:
            waiting = self._points.setdefault(run, PointColumns())
            waiting.extend(columns)
            if (excess := len(waiting) - MOST_POINTS) > 0:
                for column in (waiting.keys, waiting.steps, waiting.timestamps, waiting.values):
                    del column[:excess]

    def take(self) -> dict[str, PointColumns]:
        """Return the points that came since the last call."""
        with self._lock:
            taken, self._points = self._points, {}
        return taken


class Live:
    """Stream of what happens in a project. `publish` is called on the writer's thread, the rest on the event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._watchers: tuple[EventWatcher, ...] = ()
        self._lock = threading.Lock()
        self._closing = asyncio.Event()
        # With PostgreSQL the points of every server are read from the database; one path is enough for all of them.
        self._arrivals = Arrivals() if database.is_postgresql else None
        self._reading = asyncio.Lock()

    @property
    def takes_points(self) -> bool:
        """True where points must be published here, because nobody reads them from the database."""
        return self._arrivals is None and bool(self._watchers)

    async def follow(self) -> None:
        """Read the points that any server commits, while somebody watches, until the hub closes."""
        if self._arrivals is None:
            return
        while not await self._is_over():
            async with self._reading:
                if not self._watchers:
                    self._arrivals.reset()
                    continue
                try:
                    arrivals = await self._database.read(self._arrivals.read, self._is_wanted)
                except Refusal as refusal:
                    _log.warning("Live points wait: %s", refusal.message)
                    continue
            for arrival in arrivals:
                self.publish(arrival.project, arrival.experiment, arrival.run, arrival.columns)

    def _is_wanted(self, project: int, experiment: int, run: str) -> bool:
        return any(watcher.wants(project, experiment, run) for watcher in self._watchers)

    async def _is_over(self) -> bool:
        """Wait for one period, or for the end."""
        try:
            await asyncio.wait_for(self._closing.wait(), PERIOD_S)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End all streams, so that a server can stop."""
        self._closing.set()

    def publish(self, project: int, experiment: int, run: str, columns: PointColumns) -> None:
        """Hand points to those who watch this run."""
        for watcher in self._watchers:
            if watcher.wants(project, experiment, run):
                watcher.add(run, columns)

    async def watch(
        self,
        actor: Actor,
        *,
        run: str | None = None,
        experiment: str | None = None,
        kinds: Collection[str] = (),
        last: int | None = None,
    ) -> AsyncGenerator[Notice | None, None]:
        """Yield notices until the hub closes. None says that nothing happened for a while.

        Args:
            actor: Who asks.
            run: Only this run's.
            experiment: Only this experiment's.
            kinds: Nouns of the events that it wants, such as "job"; "points" for points. Empty: all.
            last: Number of the last event that the reader has seen. None: only events from now on.

        Raises:
            Refusal: The run or experiment is not in the actor's project.
        """
        actor.require(Right.READ)
        run = run or actor.run  # the token of a run follows that run alone
        if run is not None:
            await self._database.read(need_run, actor, run)
        if experiment is not None:
            await self._database.read(need_experiment, actor, experiment)
        seen = await self._database.read(journal.last_event) if last is None else last
        watcher = EventWatcher(actor.project, run, None if experiment is None else int(experiment), kinds)
        with self._lock:
            self._watchers = (*self._watchers, watcher)
        try:
            if self._arrivals is not None:
                async with self._reading:
                    await self._database.read(self._arrivals.begin)
            yield None  # the answer's headers go out at once
            quiet_s = 0.0
            is_over = self._closing.is_set()
            while not is_over:
                notices, seen = await self._events(actor, seen, run, watcher)
                notices += [Notice(None, "points", shown(name, columns)) for name, columns in watcher.take().items()]
                for notice in notices:
                    yield notice
                quiet_s = 0.0 if notices else quiet_s + PERIOD_S
                if quiet_s >= 15.0:
                    quiet_s = 0.0
                    yield None
                is_over = await self._is_over()
        finally:
            with self._lock:
                self._watchers = tuple(other for other in self._watchers if other is not watcher)

    async def _events(
        self, actor: Actor, seen: int, run: str | None, watcher: EventWatcher
    ) -> tuple[list[Notice], int]:
        rows = await self._database.read(journal.project_events_behind, actor.project, seen, PAGE)
        notices = []
        for row in rows:
            seen = row.id
            if (run is None or row.resource == f"run/{run}") and watcher.wants_kind(row.kind):
                body = {
                    "kind": row.kind,
                    "resource": row.resource,
                    "timestamp": row.at,
                    "detail": journal.decoded(row.body),
                }
                if row.resource.startswith("run/"):
                    body["run"] = row.resource.removeprefix("run/")
                notices.append(Notice(row.id, row.kind, body))
        return notices, seen


def shown(run: str, columns: PointColumns) -> dict[str, Any]:
    """Return points as the stream shows them: `{"run", "points": {key: [[step, timestamp, value], ...]}}`."""
    points: dict[str, list[list[Any]]] = {}
    rows = zip(columns.keys, columns.steps, columns.timestamps, columns.values, strict=True)
    for key, step, timestamp, value in rows:
        spelled: float | str = value
        if not math.isfinite(value):
            spelled = "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
        points.setdefault(key, []).append([step, timestamp, spelled])
    return {"run": run, "points": points}


class LiveTracking(Tracking):
    """Tracking whose points reach the pages that watch."""

    def __init__(self, *arguments: Any, live: Live, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._live = live

    def apply_points(self, tx: Transaction, actor: Actor, row: RunRow, columns: PointColumns) -> None:
        """Log points within a transaction, and show them once it is committed."""
        super().apply_points(tx, actor, row, columns)
        if self._live.takes_points and len(columns):
            tx.after_commit(partial(self._live.publish, actor.project, row.experiment, row.id, columns))
