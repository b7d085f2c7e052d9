"""All services of a hub over one database, opened and closed together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MissingDependency, UsageError
from ..model.access import Actor, Right, Role
from ..model.notices import NoticeRules
from ..model.refusal import Refusal
from ..model.status import HubStatus
from ..store import identities
from ..store.census import count_everything
from ..store.database import Database
from ..store.folder_blobs import FolderBlobs
from ..store.leases import NotHeld
from ..store.schema import ORGANIZATION
from . import audit, outbox
from .access import Access
from .bell import Bell
from .clock_watch import ClockWatch
from .hpo import Hpo
from .importance import Importances
from .jobs.attempts import Attempts
from .jobs.capacity import Capacity
from .jobs.history import Histories
from .jobs.jobs import NO_NOTICES, Jobs
from .jobs.launchers import Launchers
from .jobs.notices import Courier
from .jobs.queue import Queue
from .jobs.quotas import Quotas
from .jobs.scheduler import JobScheduler
from .jobs.trials import TrialJobs
from .jobs.usage import Usage
from .leader import HubLeader
from .live import Live, LiveTracking
from .people import People
from .pools import Pools
from .registry import Registry
from .sweeps import Sweeps

if TYPE_CHECKING:
    from ..store.blobs import Blobs, Bucket
    from ..store.transaction import Transaction

logger = logging.getLogger(__name__)

SWEEP_S = 5.0
"""Seconds between two looks for runs whose heartbeat is overdue, and between two renewals of the lead."""
CLEAN_UP_S = 600.0


class Hub:
    """Services of a hub.

    Args:
        database: An open database, which `close` closes.
        blobs: Where the bytes of artifacts are.
        owner: Name of the first user.
        with_auth: Whether requests need a token. Pages show a warning without.
        lost_after_s: Seconds without heartbeat after which a run is lost.
        steady: Clock in seconds that never jumps.
        rules: Receivers of news that jobs may name.
        secrets: Folder of the secrets that sign them; None for none.
    """

    def __init__(
        self,
        database: Database,
        blobs: Blobs | None,
        *,
        owner: str = "owner",
        with_auth: bool = True,
        lost_after_s: float = 60.0,
        steady: Callable[[], float] = time.monotonic,
        rules: NoticeRules = NO_NOTICES,
        secrets: Path | None = None,
    ) -> None:
        self.database = database
        self._blobs = blobs
        self.with_auth = with_auth
        self.owner = owner
        self.clock_watch = ClockWatch(database, steady)
        self.live = Live(database)
        self.tracking = LiveTracking(database, blobs, on_change=record_change, live=self.live)
        self.pools = Pools(database, on_change=record_change)
        self.registry = Registry(database, blobs, on_change=record_change)
        self.sweeps = Sweeps(database, on_change=record_change)
        self.importances = Importances(self.sweeps)
        self.access = Access(database)
        self.people = People(database, self.access)
        self.audit = audit.Audit(database)
        self.leader = HubLeader(database)
        self.bell = Bell()
        self.quotas = Quotas(database, self.bell)
        self.scheduler = JobScheduler(database, self.leader, self.bell, self.clock_watch)
        self.courier = Courier(database, self.leader, self.bell, rules, secrets)
        self.jobs = Jobs(database, blobs, on_change=record_change, bell=self.bell, rules=rules)
        self.hpo = Hpo(database, on_change=record_change, jobs=self.jobs)
        self.attempts = Attempts(
            database, blobs, on_change=record_change, bell=self.bell, grace_s=self.scheduler.policy.grace_s
        )
        self.launchers = Launchers(
            database,
            on_change=record_change,
            bell=self.bell,
            grace_s=self.scheduler.policy.grace_s,
            clock_watch=self.clock_watch,
        )
        self.trial_jobs = TrialJobs(database, on_change=record_change, bell=self.bell)
        self.capacity = Capacity(database, on_change=record_change, bell=self.bell)
        self.histories = Histories(database)
        self.queue = Queue(database, self.scheduler)
        self.usage = Usage(database)
        self._lost_after_ms = int(lost_after_s * 1000)
        self.clock_watch.excuses += [
            self.tracking.excuse_silence,
            self.launchers.excuse_silence,
            self.scheduler.excuse_silence,
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Make the first user, and begin the work that no request asks for."""
        await self.people.prepare(self.owner)
        await self.leader.begin()  # the first sweep, which renews the lead, is seconds away
        self._tasks = [
            asyncio.create_task(self._sweep(), name="skyward-hub-sweeper"),
            asyncio.create_task(self.live.follow(), name="skyward-hub-follower"),
            asyncio.create_task(self.scheduler.run(), name="skyward-hub-scheduler"),
            asyncio.create_task(self.courier.run(), name="skyward-hub-courier"),
        ]

    def end_streams(self) -> None:
        """End answers that wait for news, so that a server can stop."""
        self.live.close()
        self.bell.close()

    async def close(self) -> None:
        """Commit what was accepted and close the database. Calling it again does nothing."""
        self.end_streams()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        with suppress(Refusal):  # the database is away: the lease expires by itself
            await self.access.refused_sign_ins.record()
            await self.leader.resign()
        await asyncio.to_thread(self.database.close)

    async def status(self, actor: Actor) -> HubStatus:
        """Count all that the hub keeps. Only owners may: it spans projects."""
        actor.require(Right.OWN)
        return await self.database.read(count_everything)

    async def mark_lost(self) -> list[str]:
        """Mark silent runs as lost if this server leads, and return their ids.

        After a jump of the wall clock, earlier heartbeats look too old. So runs first get time to be heard again.

        Raises:
            NotHeld: Another server has taken the lead meanwhile.
        """
        await self.database.look_at_clock()
        await self.clock_watch.look()
        if not await self.leader.leads():
            return []
        return await self.tracking.mark_lost(self.database.clock(), self._lost_after_ms, write=self.leader.write)

    async def _clean_up(self) -> None:
        """Delete expired tokens and uploads that nobody finished."""
        await self.access.clean_up(write=self.leader.write)
        await self.jobs.forget_old(write=self.leader.write)
        if self._blobs is not None:
            await asyncio.to_thread(self._blobs.clean_up)

    async def _sweep(self) -> None:
        rounds = 0
        while True:
            await asyncio.sleep(SWEEP_S)
            rounds += 1
            try:
                await self.access.refused_sign_ins.record_due()
                await self.mark_lost()
                if rounds % int(CLEAN_UP_S / SWEEP_S) == 0 and self.leader.is_leading:
                    await self._clean_up()
            except NotHeld:
                logger.info("sweep: another server leads now")
            except Exception:
                # A database that is away for a while must not end the sweeper for good.
                logger.exception("sweep failed; the next one is due in %g s", SWEEP_S)


def record_change(tx: Transaction, actor: Actor, action: str, resource: str, detail: Mapping[str, object]) -> None:
    """Write a change to the audit and to the outbox."""
    audit.record(tx, actor, action, resource, detail)
    outbox.record(tx, actor, action, resource, detail)


def open_hub(
    database_url: str,
    place: Path | Bucket,
    *,
    owner: str = "owner",
    with_auth: bool = True,
    lost_after_s: float = 60.0,
    search_s: float = 15.0,
    rules: NoticeRules = NO_NOTICES,
    secrets: Path | None = None,
) -> Hub:
    """Open a hub.

    Args:
        database_url: `sqlite:///FILE` or `postgresql://USER@HOST/NAME`.
        place: Where the bytes of artifacts are.
        owner: Name of the first user.
        with_auth: Whether requests need a token.
        lost_after_s: Seconds without heartbeat after which a run is lost.
        search_s: Seconds that a search may take.
        rules: Receivers of news that jobs may name.
        secrets: Folder of the secrets that sign them; None for none.

    Raises:
        UsageError: The database or the place cannot be used.
    """
    blobs = open_blobs(place)
    database = Database(database_url, search_s=search_s)
    return Hub(
        database, blobs, owner=owner, with_auth=with_auth, lost_after_s=lost_after_s, rules=rules, secrets=secrets
    )


def owner_of(database: Database, name: str, project: str) -> Actor:
    """Return the owner as an actor in a project, for commands without a server. An empty hub gets its owner.

    Raises:
        UsageError: There is no such project.
    """
    number = database.read_and_wait(identities.project_named, ORGANIZATION, project)
    if number is None:
        raise UsageError(f"project={project!r}: not found; see `skyward hub project list`")
    database.write_and_wait(_add_owner, name)
    return Actor(user=name, organization=ORGANIZATION, project=number, role=Role.OWNER)


def _add_owner(tx: Transaction, name: str) -> None:
    if identities.find_account(tx, ORGANIZATION, name) is None:
        identities.add_account(tx, ORGANIZATION, name, "person", True)


def open_blobs(place: Path | Bucket) -> Blobs:
    """Open the place where the bytes of artifacts are: a folder or a bucket.

    Raises:
        UsageError: The place cannot be used.
    """
    if isinstance(place, Path):
        return FolderBlobs(place)
    try:
        from ..store.s3_blobs import S3Blobs
    except ImportError as error:
        raise MissingDependency(
            f"storage.bucket={place.name!r}: needs {error.name}; pip install 'skyward[hub-s3]'", name=error.name
        ) from None
    return S3Blobs(place)
