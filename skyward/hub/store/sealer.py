"""The thread that seals: it turns long tails into chunks, and merges the chunks of runs that ended."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from ..model.refusal import Refusal
from . import sealing
from .transaction import ReadSnapshot

T = TypeVar("T")

TAIL_POINTS = 8_192
POINTS_OF_A_KEY = 256
"""A tail is sealed when it has this many points for each metric, or TAIL_POINTS if that is more."""

END_S = 1.0
"""Seconds between a run's end and its sealing: the live streams of other servers read its last points from the tail."""

_log = logging.getLogger(__name__)


class SealedDatabase(Protocol):
    """The database, as far as the sealer's thread needs it."""

    def read_and_wait(self, operation: Callable[..., T], /, *arguments: Any) -> T: ...

    def write_and_wait(self, operation: Callable[..., T], /, *arguments: Any) -> T: ...


class Sealer:
    """Watch how long the tails of runs become, and seal them on a thread of its own."""

    def __init__(self, database: SealedDatabase) -> None:
        self._database = database
        self._points: dict[int, int] = {}
        self._keys: dict[int, set[int]] = {}
        self._queue: queue.SimpleQueue[tuple[int, float | None] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skyward-hub-sealer", daemon=True)
        self._thread.start()

    def note(self, logged: Mapping[int, tuple[int, set[int]]]) -> None:
        """Count points of runs that were committed. Called on the writer's thread.

        Args:
            logged: For each run, the number of its new points and the keys of its metrics.
        """
        for run, (points, keys) in logged.items():
            total = self._points.get(run, 0) + points
            known = self._keys.setdefault(run, set())
            known |= keys
            if total >= max(TAIL_POINTS, POINTS_OF_A_KEY * len(known)):
                total = 0
                del self._keys[run]
                self._queue.put((run, None))
            self._points[run] = total

    def finish(self, run: int) -> None:
        """Seal a run that has ended, and merge its chunks."""
        self._points.pop(run, None)
        self._keys.pop(run, None)
        self._queue.put((run, time.monotonic() + END_S))

    def seal(self, run: int, *, merges: bool) -> bool:
        """Seal a run now, on the calling thread. Returns False where another sealer was first."""
        try:
            sealed = self._database.read_and_wait(sealing.prepare_seal, run)
            if sealed is not None:
                self._database.write_and_wait(sealing.apply_seal, run, sealed)
            if merges:
                merged = self._database.read_and_wait(sealing.prepare_merge, run)
                if merged:
                    self._database.write_and_wait(sealing.apply_merge, run, merged)
        except sealing.Moved:
            return False
        return True

    def close(self) -> None:
        """End the thread after the run that it seals. The rest is sealed when the database is opened again."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._seal_safely(None, merges=False)
        while True:
            item = self._queue.get()
            if item is None:
                return
            run, due = item
            if due is not None:
                self._closing.wait(due - time.monotonic())
            self._seal_safely(run, merges=due is not None)

    def _seal_safely(self, run: int | None, *, merges: bool) -> None:
        """Seal a run, or all with long tails of an earlier process. A failure costs space, never points."""
        try:
            if run is not None:
                self.seal(run, merges=merges)
                return
            for left in self._database.read_and_wait(_long_tails):
                self.seal(left, merges=False)
        except Refusal as refusal:
            _log.warning("The sealer left points of run %s as they are: %s", run, refusal.message)
        except Exception:
            _log.exception("The sealer left points of run %s as they are.", run)


def _long_tails(snapshot: ReadSnapshot) -> list[int]:
    rows = snapshot.execute("SELECT run FROM tail GROUP BY run HAVING sum(points) >= ?", (TAIL_POINTS,))
    return [row[0] for row in rows]
