"""Watch of the hub's wall clock. After a jump of it, whoever was heard before would seem to be silent for long."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..store.database import Database

_log = logging.getLogger(__name__)

JUMP_MS = 5_000
"""Milliseconds by which a wall clock drifts, and no more: beyond that somebody has set it, or the machine has slept."""


class ClockWatch:
    """Watch of the clock of a hub's database.

    Args:
        database: The database.
        steady: Clock in seconds that never jumps, and stops while the machine sleeps.
    """

    def __init__(self, database: Database, steady: Callable[[], float] = time.monotonic) -> None:
        self._database, self._steady = database, steady
        self._offset_ms = self._offset()
        self.excuses: list[Callable[[int], object]] = []
        """Functions that give everybody time to be heard again, from this time in milliseconds since 1970 on."""

    async def look(self) -> None:
        """Look for a jump, and excuse everybody after one. Call it before silence has consequences."""
        if not self._has_jumped():
            return
        await self._database.look_at_clock()  # if it is that of another server, it may not have jumped
        if self._has_jumped():
            offset_ms = self._offset()
            _log.warning("clock: it jumped by %+.0f s; nothing is lost yet", (offset_ms - self._offset_ms) / 1000)
            self._offset_ms = offset_ms
            for excuse in self.excuses:
                excuse(self._database.clock())

    def _has_jumped(self) -> bool:
        return abs(self._offset() - self._offset_ms) > JUMP_MS

    def _offset(self) -> float:
        return self._database.clock() - self._steady() * 1000
