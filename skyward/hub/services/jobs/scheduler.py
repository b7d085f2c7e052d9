"""The scheduler: it makes a snapshot of the tables, lets `schedule.decide` decide, and writes what was decided."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...model.jobs import AttemptEnd, JobState
from ...schedule import (
    AttemptState,
    Decisions,
    End,
    EndCause,
    HubJob,
    JobAttempt,
    JobPlacement,
    JobQuota,
    JobsSnapshot,
    MachineSet,
    Policy,
    Priority,
    ProjectState,
    Reservation,
    SetKind,
    UserState,
    decide,
)
from ...schedule.shares import decayed
from ...schedule.values import with_newer_launchers
from ...store import attempts, identities, job_quotas, jobs, machine_sets
from ...store.attempts import AttemptRow
from ...store.jobs import JobRow
from ...store.leases import NotHeld
from ...store.schema import ORGANIZATION
from ...store.transaction import ReadSnapshot, Transaction
from .device_numbers import assign_devices
from .kept import KeptMachines, give_back, lose_kept
from .life import enter, finish_attempt, lease_s, lose_runner, release_attempt, shape_of, stop_attempt
from .protocol import needs_newer, needs_newest, release_from_older
from .saves import tell_late_saves
from .triggers import pull_triggers

if TYPE_CHECKING:
    from ...model.capacity import MachineSetRecord
    from ...model.quotas import HolderKind, JobQuotaSpec
    from ...store.database import Database
    from ..bell import Bell
    from ..clock_watch import ClockWatch
    from ..leader import HubLeader

_log = logging.getLogger(__name__)

PERIOD_S = 1.0
START_S = 60.0
"""Seconds that a launcher has to bring a runner up. No pool is open before the runner was heard."""
UNSERVED_S = 300.0
"""Seconds for which a set that no launcher serves gets no jobs."""
_NOTED_S = 10.0
_REST_S = 0.25
FENCE_S = 1200.0
"""Seconds without an answer of the hub after which a runner ends its machines and itself."""
Active = Sequence[tuple[JobRow, AttemptRow]]

_STATES = {
    JobState.RESERVED: AttemptState.RESERVED,
    JobState.STARTING: AttemptState.STARTING,
    JobState.RUNNING: AttemptState.RUNNING,
    JobState.PREEMPTING: AttemptState.PREEMPTING,
    JobState.LOST: AttemptState.PREEMPTING,  # it leaves its machines when their lease is over
}
_CAUSES = {
    EndCause.TIME: (JobState.TIMED_OUT, "max_duration_s: its time is over"),
    EndCause.BUDGET: (JobState.FAILED, "budget_usd: it is spent"),
    EndCause.QUOTA_MONEY: (JobState.FAILED, "quota: the money of its project or user is spent for the day or month"),
}


class JobScheduler:
    """Scheduler of one server. It works only while its server leads, and each step is one fenced transaction.

    Args:
        database: Where the jobs are.
        leader: The candidate for the lead.
        bell: Rings when a job has changed.
        clock_watch: Watch of the database's clock.
        policy: Rules.
    """

    def __init__(
        self,
        database: Database,
        leader: HubLeader,
        bell: Bell,
        clock_watch: ClockWatch,
        policy: Policy | None = None,
    ) -> None:
        self._database, self._clock_watch = database, clock_watch
        self._leader = leader
        self._bell = bell
        self.policy = policy or Policy()
        self._leads_since: int | None = None

    async def run(self) -> None:
        """Decide whenever a job has changed, and each second, until the hub stops.

        A closed bell waits for nothing, so without this look the loop of a server that does not lead would never yield.
        """
        while not self._bell.is_closed:
            seen, began = self._bell.decisive, time.monotonic()
            try:
                await self.step()
            except NotHeld:
                _log.info("scheduler: another server leads now")
            except Exception:
                # A database that is away for a while must not end the scheduler for good.
                _log.exception("scheduler: a decision failed; the next one is due in %g s", PERIOD_S)
            # Others write only between decisions, and those of a long queue take a while.
            await asyncio.sleep(min(time.monotonic() - began, _REST_S))
            await self._bell.wait_to_decide(seen, PERIOD_S)

    def excuse_silence(self, now: int) -> None:
        """Give all runners time to be heard again, as after a change of the lead: the clock has jumped to `now`."""
        if self._leads_since is not None:
            self._leads_since = now

    async def step(self) -> None:
        """Decide once, if this server leads and a job is not over.

        Raises:
            NotHeld: Another server has taken the lead meanwhile.
        """
        if not self._leader.is_leading:
            self._leads_since = None
            return
        await self._clock_watch.look()
        if self._leads_since is None:
            self._leads_since = self._database.clock()
        if await self._database.read(_has_work) and await self._leader.write(
            decide_and_write, self.policy, self._leads_since
        ):
            self._bell.ring_quietly()  # launchers and runners wait for it


def decide_and_write(tx: Transaction, policy: Policy, leads_since: int) -> bool:
    """Decide what should happen now, and write it. Return whether a job got machines.

    Args:
        tx: A fenced transaction.
        policy: Rules.
        leads_since: Time since which this server leads. Runners that fell silent before get time to be heard again.
    """
    _end_lost(tx, leads_since)
    pull_triggers(tx)
    sets = machine_sets.machine_sets(tx)
    kept = KeptMachines(tx, sets)
    active = attempts.active_attempts(tx)
    _clear_obstacles(tx, active, kept.rows)
    tell_late_saves(tx, active)
    waiting = jobs.waiting_jobs(tx, tx.now, for_update=tx.for_update)
    if not waiting and not active:
        return False
    snapshot = make_snapshot(tx, policy, sets, waiting, active, tx.now, kept)
    decisions = decide(snapshot, tx.now / 1000)
    by_id = {job.id: (job, attempt) for job, attempt in active}
    queued = {job.id: job for job in waiting}
    grace_ms = int(policy.grace_s * 1000)
    for end in decisions.ends:
        _end(tx, *by_id[end.job], end, grace_ms)
    _place_all(tx, decisions, sets, kept, by_id, queued, grace_ms)
    _write_reasons(tx, decisions, {**queued, **{job.id: job for job, _ in active}})
    return bool(decisions.placements)


def _place_all(
    tx: Transaction,
    decisions: Decisions,
    sets: Sequence[MachineSetRecord],
    kept: KeptMachines,
    active: Mapping[str, tuple[JobRow, AttemptRow]],
    queued: Mapping[str, JobRow],
    grace_ms: int,
) -> None:
    """Give jobs the machines that were decided: those of a runner that waits, or others."""
    held = [attempt for _, attempt in active.values()]
    specs = {record.spec.name: record.spec for record in sets}
    for placement in decisions.placements:
        job, victims = queued[placement.job], [active[victim] for victim in placement.victims]
        runner = None
        if kept.rows and not victims:
            others = {*_nodes_in(held, placement.machines), *_given_nodes(decisions, placement)}
            runner = kept.take(job, placement.machines, placement.nodes, others)
        if runner is not None:
            held.append(_place(tx, job, placement, runner.nodes, (), runner))
            continue
        machines = specs[placement.machines]
        each = shape_of(job.decoded_spec()).devices or machines.devices
        gone = {victim.pk for _, victim in victims}
        nodes = assign_devices(machines, placement.nodes, each, [*held, *kept.rows], gone)
        nodes = nodes or assign_devices(machines, placement.nodes, each, held, gone)
        if nodes is None:  # only gangs on parts of nodes, whose neighbours have different numbers
            why = f"waits for devices with the same numbers on each of its nodes: {each}"
            jobs.set_reasons(tx, [(why, False, job.pk)])
            continue
        for victim in victims:
            stop_attempt(tx, *victim, f"makes way for job {job.id}", grace_ms=grace_ms)
        attempt = _place(tx, job, placement, nodes, [victim.pk for _, victim in victims])
        if obstacles := kept.clear(machines, attempt.node_numbers, attempt.device_numbers):
            attempt.waits_for = json.dumps([*attempt.obstacles, *obstacles])
            attempts.update_attempt(tx, attempt)
        held.append(attempt)


def _nodes_in(held: Iterable[AttemptRow], machines: str) -> set[int]:
    return {node for attempt in held if attempt.machines == machines for node in attempt.node_numbers}


def _given_nodes(decisions: Decisions, apart: JobPlacement) -> set[int]:
    """Return the nodes of a set that other jobs are given now, or have reserved."""
    given = {node for one in decisions.placements if one is not apart for node in _nodes_of(one, apart.machines)}
    return given | {node for one in decisions.reservations for node in _nodes_of(one, apart.machines)}


def _nodes_of(chosen: JobPlacement | Reservation, machines: str) -> Sequence[int]:
    return chosen.nodes if chosen.machines == machines else ()


def make_snapshot(
    snapshot: ReadSnapshot,
    policy: Policy,
    sets: Sequence[MachineSetRecord],
    waiting: Sequence[JobRow],
    active: Active,
    now: int,
    kept: KeptMachines | None = None,
) -> JobsSnapshot:
    """Return what the tables say at the time `now` in milliseconds, as the scheduler reads it."""
    names = {project[0]: project[1] for project in identities.projects(snapshot, ORGANIZATION, None)}
    # Cancelled jobs of a deleted project hold their machines until they are gone.
    held = names | identities.deleted_projects(snapshot, ORGANIZATION)
    known = {record.spec.name for record in sets}
    job_of = {attempt.pk: job.id for job, attempt in active}
    quotas, spending = job_quotas.job_quotas(snapshot), job_quotas.JobSpending(snapshot, now)
    return JobsSnapshot(
        machines=tuple(_machine_set(record, kept.warm(record.spec.name) if kept else {}) for record in sets),
        projects=tuple(_projects(snapshot, names, policy, now, quotas, spending)),
        users=tuple(_users(quotas, spending)),
        waiting=tuple(_hub_job(job, names) for job in waiting if job.project in names),
        attempts=tuple(
            _job_attempt(job, attempt, held, frozenset(job_of[pk] for pk in attempt.obstacles if pk in job_of))
            for job, attempt in active
            if attempt.machines in known and job.project in held
        ),
        reserved=frozenset(job.id for job in waiting if job.has_turn),
        policy=policy,
    )


def _machine_set(record: MachineSetRecord, warm: Mapping[int, str]) -> MachineSet:
    spec = record.spec
    return MachineSet(
        name=spec.name,
        kind=SetKind(spec.kind),
        nodes=spec.nodes,
        devices=spec.devices,
        accelerator=spec.accelerator,
        vcpus=spec.vcpus,
        memory_gib=spec.memory_gib,
        region=spec.region,
        labels=frozenset(spec.labels),
        usd_per_hour=spec.usd_per_hour,
        max_usd_per_hour=math.inf if spec.max_usd_per_hour is None else spec.max_usd_per_hour,
        projects=None if spec.projects is None else frozenset(spec.projects),
        is_draining=record.is_draining,
        warm=warm,
        full_until=record.full_until / 1000,
        older_until=record.older_until / 1000,
    )


def _projects(
    snapshot: ReadSnapshot,
    names: Mapping[int, str],
    policy: Policy,
    now: int,
    quotas: Mapping[tuple[HolderKind, str], JobQuotaSpec],
    spending: job_quotas.JobSpending,
) -> Iterable[ProjectState]:
    uses = machine_sets.device_uses(snapshot)
    for project, name in names.items():
        spec = quotas.get(("project", name))
        if project not in uses and spec is None:
            continue
        used = {
            kind: decayed({kind: seconds}, (now - at) / 1000, policy.half_life_s)[kind]
            for kind, (seconds, at) in uses.get(project, {}).items()
        }
        today, month = spending.projects.get(project, (0.0, 0.0))
        yield ProjectState(
            name=name,
            weight=1.0 if spec is None else spec.weight,
            quota=JobQuota() if spec is None else _quota(spec),
            used=used,
            spent_today_usd=today,
            spent_month_usd=month,
        )


def _users(
    quotas: Mapping[tuple[HolderKind, str], JobQuotaSpec], spending: job_quotas.JobSpending
) -> Iterable[UserState]:
    for (holder, name), spec in quotas.items():
        if holder == "user":
            today, month = spending.users.get(name, (0.0, 0.0))
            # Only projects borrow from each other.
            quota = replace(_quota(spec), may_borrow=False)
            yield UserState(name=name, quota=quota, spent_today_usd=today, spent_month_usd=month)


def _quota(spec: JobQuotaSpec) -> JobQuota:
    return JobQuota(
        devices=spec.devices,
        may_borrow=spec.may_borrow,
        nodes=spec.nodes,
        jobs=spec.jobs,
        usd_per_day=math.inf if spec.usd_per_day is None else spec.usd_per_day,
        usd_per_month=math.inf if spec.usd_per_month is None else spec.usd_per_month,
    )


def _hub_job(job: JobRow, names: Mapping[int, str], spent_usd: float = 0.0) -> HubJob:
    spec = job.decoded_spec()
    return HubJob(
        id=job.id,
        project=names[job.project],
        user=job.owner,
        order=job.pk,
        shape=shape_of(spec),
        max_duration_s=spec.max_duration_s,
        priority=Priority(job.priority),
        is_preemptible=spec.is_preemptible,
        warm=job.warm or "",
        needs_newer=needs_newest(spec),
        budget_usd=math.inf if spec.budget_usd is None else spec.budget_usd,
        spent_usd=job.cost + spent_usd,
    )


def _job_attempt(job: JobRow, attempt: AttemptRow, names: Mapping[int, str], waits_for: frozenset[str]) -> JobAttempt:
    ends_by = attempt.free_at or attempt.ends_by
    began_at = (attempt.began_at or attempt.reserved_at) / 1000
    return JobAttempt(
        job=_hub_job(job, names, attempt.cost),
        machines=attempt.machines,
        nodes=attempt.node_numbers,
        state=_STATES[JobState(job.state)],
        began_at=began_at,
        saved_at=began_at if attempt.saved_at is None else attempt.saved_at / 1000,
        ends_by=math.inf if ends_by is None else ends_by / 1000,
        on_loan=attempt.on_loan,
        waits_for=waits_for,
    )


# Writing --------------------------------------------------------------------------------------------------------------


def _has_work(snapshot: ReadSnapshot) -> bool:
    work = (
        "SELECT 1 FROM job WHERE ended_at IS NULL UNION ALL SELECT 1 FROM attempt WHERE kept_until IS NOT NULL LIMIT 1"
    )
    return snapshot.execute(work).fetchone() is not None


def _end_lost(tx: Transaction, leads_since: int) -> None:
    """End the attempts, and the waiting of runners, whose machines are surely gone or that nobody will ever take."""
    _end_lost_attempts(tx, leads_since)
    _end_lost_kept(tx, leads_since)
    _release_unserved(tx, leads_since)


def _end_lost_attempts(tx: Transaction, leads_since: int) -> None:
    for job, attempt in attempts.active_attempts(tx, for_update=tx.for_update):
        if job.state == JobState.LOST and attempt.free_at is not None and attempt.free_at <= tx.now:
            finish_attempt(tx, job, attempt, AttemptEnd.LOST)
        elif job.state == JobState.STARTING and attempt.heard_at is None:
            claimed_at = max(attempt.claimed_at or 0, leads_since)
            if tx.now - claimed_at > START_S * 1000:
                finish_attempt(tx, job, attempt, AttemptEnd.START_FAILED, "runner: it did not come up")
        elif attempt.heard_at is not None and job.state != JobState.LOST:
            silent_ms = tx.now - max(attempt.heard_at, leads_since)
            if silent_ms > FENCE_S * 1000:
                lose_runner(tx, job, attempt, f"runner: not heard for {FENCE_S:g} s, after which it ends by itself")
        is_late = attempt.ends_by is not None and attempt.ends_by <= tx.now and attempt.command != "abort"
        if job.state == JobState.PREEMPTING and is_late:
            attempt.order("abort")
            attempts.update_attempt(tx, attempt)


def _release_unserved(tx: Transaction, leads_since: int) -> None:
    """Take machines back from attempts that no launcher takes, so that their jobs are placed elsewhere."""
    sets = machine_sets.machine_sets(tx)
    known = {record.spec.name for record in sets}
    for job, attempt in attempts.active_attempts(tx, for_update=tx.for_update):
        if job.state != JobState.RESERVED or attempt.launcher is not None:
            continue
        waits_ms = tx.now - max(attempt.claimed_at or attempt.reserved_at, leads_since)
        if attempt.machines not in known:
            release_attempt(tx, job, attempt)
        elif needs_newer(job):
            has_others = _suit_with_newer_launchers(tx, sets, job)
            if has_others or waits_ms > _NOTED_S * 1000:
                release_from_older(tx, job, attempt, has_others=has_others)
        elif not attempt.obstacles and waits_ms > START_S * 1000:
            machine_sets.set_full(tx, attempt.machines, tx.now + int(UNSERVED_S * 1000))
            release_attempt(tx, job, attempt)
        elif not attempt.obstacles and waits_ms > _NOTED_S * 1000 and not job.why:
            why = f"no launcher has taken it yet: run `skyward hub launcher` where machines {attempt.machines!r} are"
            jobs.set_reasons(tx, [(why, job.has_turn, job.pk)])


def _suit_with_newer_launchers(tx: Transaction, sets: Sequence[MachineSetRecord], job: JobRow) -> bool:
    """Return whether a job that needs a newer launcher may be placed on machines that are not known to lack one."""
    shape, project = shape_of(job.decoded_spec()), str(identities.name_of_project(tx, job.project))
    newer = with_newer_launchers([_machine_set(record, {}) for record in sets], tx.now / 1000)
    return any(machines.suits(shape, project) for machines in newer)


def _end_lost_kept(tx: Transaction, leads_since: int) -> None:
    """Give up the kept machines that are surely gone, and those of runners that have not been heard for long."""
    for _, runner in attempts.kept_attempts(tx, for_update=tx.for_update):
        silent_ms = tx.now - max(runner.heard_at or 0, leads_since)
        if runner.free_at is not None and runner.free_at <= tx.now:
            give_back(tx, runner)
        elif silent_ms > FENCE_S * 1000:
            lose_kept(tx, runner, lease_s(tx, runner.machines))


def _clear_obstacles(tx: Transaction, active: Active, kept: Iterable[AttemptRow]) -> None:
    """Let placed jobs begin whose machines have become free."""
    present = {attempt.pk for _, attempt in active} | {-runner.pk for runner in kept}
    for _, attempt in active:
        left = [pk for pk in attempt.obstacles if pk in present]
        if len(left) < len(attempt.obstacles):
            attempt.waits_for = json.dumps(left)
            attempt.claimed_at = tx.now  # launchers may take it from now on
            attempts.update_attempt(tx, attempt)


def _end(tx: Transaction, job: JobRow, attempt: AttemptRow, end: End, grace_ms: int) -> None:
    state, reason = _CAUSES[end.cause]
    if job.state in (JobState.PREEMPTING, JobState.LOST) or job.ends_as is not None:
        return
    job.ends_as = state
    stop_attempt(tx, job, attempt, reason, grace_ms=grace_ms)


def _place(
    tx: Transaction,
    job: JobRow,
    placement: JobPlacement,
    nodes: str,
    obstacles: Sequence[int],
    runner: AttemptRow | None = None,
) -> AttemptRow:
    if job.attempts:
        jobs.drop_results(tx, job.pk)  # the error of an earlier attempt, which this one may not end with
    job.attempts += 1
    job.has_turn = False
    attempt = AttemptRow(
        job=job.pk,
        number=job.attempts,
        machines=placement.machines,
        nodes=nodes,
        waits_for=json.dumps(list(obstacles)),
        on_loan=placement.on_loan,
        reserved_at=tx.now,
        # A runner that is there was heard, and is lost when it falls silent.
        launcher=None if runner is None else runner.launcher,
        heard_at=None if runner is None else tx.now,
        runner=None if runner is None else runner.pk,
    )
    attempts.add_attempt(tx, attempt)
    enter(tx, job, JobState.RESERVED)
    jobs.update_job(tx, job)
    return attempt


def _write_reasons(tx: Transaction, decisions: Decisions, known: Mapping[str, JobRow]) -> None:
    """Write the sentence of each job that waits, where it has changed."""
    turns = {reservation.job for reservation in decisions.reservations}
    changed = []
    for job_id, reason in decisions.waiting.items():
        job, sentence, has_turn = known[job_id], reason.sentence(), job_id in turns
        if (job.why, job.has_turn) != (sentence, has_turn):
            changed.append((sentence, has_turn, job.pk))
    if changed:
        jobs.set_reasons(tx, changed)
