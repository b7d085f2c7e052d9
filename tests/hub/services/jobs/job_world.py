"""Jobs over the real database and scheduler, with runners that are calls of the test, and a clock that it moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from skyward.hub.model.access import Actor, Role
from skyward.hub.model.capacity import MachineSetSpec
from skyward.hub.model.jobs import PROTOCOL, AttemptEnd, JobRecord, JobSpec
from skyward.hub.services.hub import Hub
from skyward.hub.services.jobs.jobs import NewJob
from skyward.hub.services.jobs.launchers import LauncherOrders
from skyward.hub.services.jobs.launches import Launch
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from tests.hub.services.hubs import ADA

T = TypeVar("T")

OWNER = Actor(user="owner", organization=1, project=1, role=Role.OWNER)
LOCAL = MachineSetSpec(name="local", provider={"type": "local"}, nodes=4, projects=("*",))
SPEC = JobSpec(devices=None, max_duration_s=3600.0)


class World:
    """A hub whose scheduler takes a step when the test says so, by the test's clock."""

    def __init__(self, url: str, blobs: FolderBlobs) -> None:
        self.now_s, self.jumped_s, self.url = 1_800_000_000.0, 0.0, url
        self.hub = Hub(Database(url, clock=self.clock), blobs, steady=self.steady)
        self.launches: dict[tuple[str, int], Launch] = {}
        self.loop = asyncio.new_event_loop()
        self.do(self.hub.people.prepare("owner"))
        self.do(self.hub.capacity.declare(OWNER, LOCAL))

    def clock(self) -> int:
        return int(self.now_s * 1000)

    def steady(self) -> float:
        return self.now_s - self.jumped_s

    def sleep(self, seconds: float) -> None:
        """Let the machine sleep: only its wall clock goes on."""
        self.now_s += seconds
        self.jumped_s += seconds

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def pass_s(self, seconds: float) -> None:
        """Let time pass, and let the scheduler decide."""
        self.now_s += seconds
        self.do(self.hub.leader.leads())
        self.do(self.hub.scheduler.step())

    def submit(self, name: str = "train", *, actor: Actor = ADA, **changes: object) -> str:
        options = {key: changes.pop(key) for key in ("key", "priority", "is_held") if key in changes}
        new = NewJob(name=name, spec=replace(SPEC, **changes), **options)  # type: ignore[arg-type]
        record: JobRecord = self.do(self.hub.jobs.submit(actor, new))
        return record.id

    def job(self, job_id: str) -> JobRecord:
        record: JobRecord = self.do(self.hub.jobs.job(ADA, job_id))
        return record

    def state(self, job_id: str) -> str:
        return self.job(job_id).state.value

    def poll(
        self, launcher: str = "here", gone: tuple[tuple[str, int], ...] = (), protocol: int = PROTOCOL
    ) -> LauncherOrders:
        known = list(self.launches)
        orders: LauncherOrders = self.do(
            self.hub.launchers.poll(OWNER, launcher, known=known, gone=list(gone), protocol=protocol)
        )
        self.launches |= {(launch.job, launch.attempt): launch for launch in orders.start}
        for key in orders.forget:
            self.launches.pop(key, None)
        return orders

    def beat(
        self,
        job_id: str,
        number: int = 1,
        *,
        is_running: bool = True,
        cost_usd: float = 0.0,
        saved_at: int | None = None,
    ) -> str:
        order = self.do(
            self.hub.attempts.beat(ADA, job_id, number, is_running=is_running, cost_usd=cost_usd, saved_at=saved_at)
        )
        return str(order.command)

    def begin(self, job_id: str, number: int = 1) -> None:
        """Bring the job to its run."""
        self.pass_s(0.1)
        self.poll()
        self.beat(job_id, number)
        assert self.state(job_id) == "running"

    def end(self, job_id: str, end: AttemptEnd, number: int = 1, error: str = "") -> None:
        if end is AttemptEnd.COMPLETED:
            self.do(self.hub.attempts.put_result(ADA, job_id, number, "value", pieces(b"42")))
        self.do(self.hub.attempts.end(ADA, job_id, number, end, error=error))


both = pytest.mark.parametrize("world", ["sqlite", "postgresql"], indirect=True)
"""Tests that use each statement of the store run on both databases, the others on SQLite."""


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data
