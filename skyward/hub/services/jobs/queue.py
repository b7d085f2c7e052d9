"""The queue as its users see it: who runs where, who comes next, and which devices are promised to whom."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...model.access import Actor, Right
from ...model.capacity import MachineSetRecord
from ...model.queue import DeviceSpan, QueuedJob, QueuePlan, SetPlan
from ...schedule import Decisions, JobsSnapshot, Policy, Reservation, decide
from ...store import attempts, jobs, machine_sets
from ...store.attempts import AttemptRow
from ...store.database import Database
from ...store.jobs import JobRow
from ...store.transaction import ReadSnapshot
from ..calls import require_no_run_token
from .job_records import record_of
from .life import shape_of
from .scheduler import JobScheduler, make_snapshot

KEPT_MS, PART = 1000, 0.05
"""Milliseconds for which one look at the queue serves all who ask, at least, and the part of a core that looks may
take: with 10,000 waiting jobs each one takes 0.25 s."""


@dataclass(frozen=True, slots=True)
class _Outlook:
    """The scheduler's next decision, as it would be now, with everything that it depends on."""

    at: int
    sets: Sequence[MachineSetRecord]
    active: Sequence[tuple[JobRow, AttemptRow]]
    snapshot: JobsSnapshot
    decisions: Decisions
    places: Mapping[str, int]
    waiting: Mapping[str, JobRow] = field(default_factory=dict)
    kept_ms: float = KEPT_MS

    def stranded(self) -> Mapping[str, int]:
        return {alert.machines: alert.devices for alert in self.decisions.stranded}


class Queue:
    """Reads the queue. The scheduler's own function decides again, without any effect, on whichever server is asked."""

    def __init__(self, database: Database, scheduler: JobScheduler) -> None:
        self._database = database
        self._scheduler = scheduler
        self._asking = asyncio.Lock()
        self._kept: _Outlook | None = None

    async def plan(self, actor: Actor, limit: int = 500) -> QueuePlan:
        """Return the queue, with the jobs of the actor's project. Jobs of others have no name there.

        Args:
            actor: Who asks.
            limit: Most jobs in the answer.
        """
        actor.require(Right.READ)
        require_no_run_token(actor)
        outlook = await self._outlook()
        rows = await self._database.read(jobs.unfinished_jobs, actor.project, limit + 1)
        held = {job.id: attempt.cost for job, attempt in outlook.active}
        reserved = {reservation.job: _ms(reservation.at) for reservation in outlook.decisions.reservations}
        listed = [
            QueuedJob(
                record=record_of(row, open_cost=held.get(row.id, 0.0)),
                needs=shape_of(row.decoded_spec()).in_words(),
                place=outlook.places.get(row.id),
                starts_by=reserved.get(row.id),
            )
            for row in rows[:limit]
        ]
        listed.sort(key=_order)
        return QueuePlan(
            at=outlook.at,
            waiting=len(outlook.places),
            jobs=listed,
            has_more=len(rows) > limit,
            sets=[_set_plan(record, outlook, actor.project) for record in outlook.sets],
        )

    async def stranded(self) -> Mapping[str, int]:
        """Return machine set -> idle devices that a waiting job could use if they were on fewer nodes."""
        return (await self._outlook()).stranded()

    async def _outlook(self) -> _Outlook:
        async with self._asking:
            now = self._database.clock()
            if self._kept is None or not 0 <= now - self._kept.at < self._kept.kept_ms:
                self._kept = await self._database.read(_look, self._scheduler.policy, now)
            return self._kept


def _look(snapshot: ReadSnapshot, policy: Policy, now: int) -> _Outlook:
    began_s = time.thread_time()
    active = attempts.active_attempts(snapshot)
    waiting = jobs.waiting_jobs(snapshot, now)
    sets = machine_sets.machine_sets(snapshot)
    state = make_snapshot(snapshot, policy, sets, waiting, active, now)
    decisions = decide(state, now / 1000)
    may_begin = {job.id for job in state.waiting}
    order = [placement.job for placement in decisions.placements]
    order += [job for job in decisions.waiting if job in may_begin]
    return _Outlook(
        at=now,
        sets=sets,
        active=active,
        snapshot=state,
        decisions=decisions,
        places={job: place for place, job in enumerate(order, 1)},
        waiting={job.id: job for job in waiting},
        kept_ms=max(KEPT_MS, (time.thread_time() - began_s) / PART * 1000),
    )


def _order(job: QueuedJob) -> tuple[bool, float, int]:
    has_machines = job.record.state.has_attempt
    return not has_machines, job.place or float("inf"), job.record.created_at


def _set_plan(record: MachineSetRecord, outlook: _Outlook, project: int) -> SetPlan:
    return SetPlan(
        spec=record.spec,
        is_draining=record.is_draining,
        full_until=record.full_until,
        stranded=outlook.stranded().get(record.spec.name, 0),
        spans=list(_spans(record, outlook, project)),
    )


def _spans(record: MachineSetRecord, outlook: _Outlook, project: int) -> Iterator[DeviceSpan]:
    leaves = {attempt.job.id: attempt.leaves_at for attempt in outlook.snapshot.attempts}
    leaves_by_pk = {attempt.pk: leaves.get(job.id, 0.0) for job, attempt in outlook.active}
    for job, attempt in outlook.active:
        if attempt.machines == record.spec.name:
            is_own = job.project == project
            begins_at = max([attempt.reserved_at, *(_ms(leaves_by_pk.get(pk, 0.0)) for pk in attempt.obstacles)])
            lasts_ms = _ms(leaves.get(job.id, 0.0)) - attempt.reserved_at
            yield DeviceSpan(
                job=job.id if is_own else "",
                name=job.name if is_own else "",
                state=job.state,
                nodes=attempt.node_numbers,
                devices=attempt.device_numbers,
                each=shape_of(job.decoded_spec()).devices or record.spec.devices,
                begins_at=begins_at,
                ends_by=max(begins_at + lasts_ms, outlook.at),
                on_loan=attempt.on_loan,
            )
    for reservation in outlook.decisions.reservations:
        if reservation.machines == record.spec.name and (row := outlook.waiting.get(reservation.job)):
            yield _reserved(record, reservation, row, project)


def _reserved(record: MachineSetRecord, reservation: Reservation, row: JobRow, project: int) -> DeviceSpan:
    spec = row.decoded_spec()
    return DeviceSpan(
        job=row.id if row.project == project else "",
        name=row.name if row.project == project else "",
        state="reservation",
        nodes=reservation.nodes,
        devices=(),
        each=shape_of(spec).devices or record.spec.devices,
        begins_at=_ms(reservation.at),
        ends_by=_ms(reservation.at + spec.max_duration_s),
    )


def _ms(seconds: float) -> int:
    return int(min(seconds, 2.0**52 / 1000) * 1000)
