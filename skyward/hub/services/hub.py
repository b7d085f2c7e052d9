"""All services of a hub over one database, opened and closed together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..model.access import Actor
from ..store.database import Database
from ..store.folder_blobs import FolderBlobs
from . import audit, outbox
from .access import Access
from .live import Live, LiveTracking
from .people import People

if TYPE_CHECKING:
    from ..store.blobs import Blobs
    from ..store.transaction import Transaction

logger = logging.getLogger(__name__)

SWEEP_S = 5.0
"""Seconds between two looks for runs whose heartbeat is overdue."""
CLEAN_UP_S = 600.0


class Hub:
    """Services of a hub.

    Args:
        database: An open database, which `close` closes.
        blobs: Where the bytes of artifacts are.
        owner: Name of the first user.
        with_auth: Whether requests need a token. Pages show a warning without.
        lost_after_s: Seconds without heartbeat after which a run is lost.
    """

    def __init__(
        self,
        database: Database,
        blobs: Blobs | None,
        *,
        owner: str = "owner",
        with_auth: bool = True,
        lost_after_s: float = 60.0,
    ) -> None:
        self.database = database
        self.with_auth = with_auth
        self.owner = owner
        self.live = Live(database)
        self.tracking = LiveTracking(database, blobs, on_change=record_change, live=self.live)
        self.access = Access(database)
        self.people = People(database, self.access)
        self.audit = audit.Audit(database)
        self._lost_after_ms = int(lost_after_s * 1000)
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Make the first user, and begin the work that no request asks for."""
        await self.people.prepare(self.owner)
        self._sweeper = asyncio.create_task(self._sweep(), name="skyward-hub-sweeper")

    async def close(self) -> None:
        """Commit what was accepted and close the database. Calling it again does nothing."""
        self.live.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
            self._sweeper = None
        await asyncio.to_thread(self.database.close)

    async def _sweep(self) -> None:
        rounds = 0
        while True:
            await asyncio.sleep(SWEEP_S)
            rounds += 1
            try:
                await self.tracking.mark_lost(self.database.clock(), self._lost_after_ms)
                if rounds % int(CLEAN_UP_S / SWEEP_S) == 0:
                    await self.access.clean_up()
            except Exception:
                # A database that is away for a while must not end the sweeper for good.
                logger.exception("sweep failed; the next one is due in %g s", SWEEP_S)


def record_change(tx: Transaction, actor: Actor, action: str, resource: str, detail: Mapping[str, object]) -> None:
    """Write a change to the audit and to the outbox."""
    audit.record(tx, actor, action, resource, detail)
    outbox.record(tx, actor, action, resource, detail)


def open_hub(
    database_url: str, folder: Path, *, owner: str = "owner", with_auth: bool = True, lost_after_s: float = 60.0
) -> Hub:
    """Open a hub whose artifacts are in a folder.

    Raises:
        UsageError: The database cannot be used.
    """
    return Hub(Database(database_url), FolderBlobs(folder), owner=owner, with_auth=with_auth, lost_after_s=lost_after_s)
