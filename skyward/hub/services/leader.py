"""The leader: the one of a hub's servers that does the work that no request asks for."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from ..store import leases

if TYPE_CHECKING:
    from ..store.database import Database
    from ..store.transaction import Transaction

P = ParamSpec("P")
T = TypeVar("T")

LEASE_S = 15.0
"""Seconds after which a leader that is not heard of is replaced. It renews its lease every 5."""
_NAME = "periodic"
_log = logging.getLogger(__name__)


class Write(Protocol):
    """`Database.write`, or that of a leader, which writes only as long as it leads."""

    async def __call__(
        self, operation: Callable[Concatenate[Transaction, P], T], *arguments: P.args, **options: P.kwargs
    ) -> T: ...


class HubLeader:
    """Candidate for the leadership of one database. With SQLite, whose only process this is, it leads from `begin` on.

    Args:
        database: The database that the candidates share.
        lasts_s: Seconds without renewal after which another candidate may lead.
    """

    def __init__(self, database: Database, *, lasts_s: float = LEASE_S) -> None:
        self._database = database
        self._lasts_ms = int(lasts_s * 1000)
        self._fence: int | None = None
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"

    @property
    def is_leading(self) -> bool:
        """True if `leads` last said so."""
        return self._fence is not None

    async def begin(self) -> bool:
        """Take the lead as the first candidate of this process, if it is free, and tell whether it was.

        With SQLite it is free: only one process has the database open, so any other that held the lead has ended.
        """
        if not self._database.is_postgresql:
            await self._database.write(leases.end_lease, _NAME)
        return await self.leads()

    async def leads(self) -> bool:
        """Take or renew the lead, and tell whether this candidate has it. Call it each few seconds."""
        before = self._fence  # kept meanwhile: the scheduler looks at it between two steps of this
        try:
            self._fence = await self._database.write(leases.take_lease, _NAME, self.holder, self._lasts_ms)
        except BaseException:
            self._fence = None
            raise
        if self._fence not in (None, before):
            _log.info("This server leads now, as number %d.", self._fence)
        return self._fence is not None

    async def write(
        self, operation: Callable[Concatenate[Transaction, P], T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Do what `Database.write` does, in a transaction that succeeds only while this candidate leads.

        Raises:
            NotHeld: Another one leads, whatever `leads` returned before.
        """

        def fenced(tx: Transaction) -> T:
            leases.need_lease(tx, _NAME, self._fence or 0)
            return operation(tx, *arguments, **options)

        return await self._database.write(fenced)

    async def resign(self) -> None:
        """Give the lead up, so that another candidate need not wait for the lease's end."""
        fence, self._fence = self._fence, None
        if fence is not None:
            await self._database.write(leases.give_up_lease, _NAME, fence)
