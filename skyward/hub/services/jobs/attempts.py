"""Attempts as their runners see them: begun, followed by messages, and ended.

Every message of a runner carries the number of its attempt, and the token that was made for it. One that is stale is
refused with CONFLICT or MISSING, and its runner ends.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...model.access import Actor, Right
from ...model.jobs import BLOBS, PROTOCOL, AttemptEnd, Feed, JobState
from ...model.refusal import Reason, Refusal
from ...store import artifacts, attempts, jobs, machine_sets
from ...store.attempts import AttemptRow
from ...store.jobs import JobRow
from ...store.transaction import ReadSnapshot, Transaction
from ..bell import Bell
from ..calls import Service, require_no_run_token
from ..receiving import receive_blob
from .gpu_use import note_gpus
from .job_records import need_job
from .kept import CLOSE, close, give_back, kept_s
from .launches import Launch, claim
from .life import announce, enter, finish_attempt, machines_named, note_cost, note_idle_cost
from .protocol import check_protocol
from .saves import note_saves

FULL_S = 60.0
"""Seconds for which a provider without machines is not asked again."""
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOrder:
    """Answer to a runner: a command of "save", "stop" or "abort", or none, its number, and the time in milliseconds."""

    command: str
    number: int
    grace_s: float
    now: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NextOrder:
    """Answer to a runner that waits: the next attempt, or the order to end. Neither: it must ask again."""

    launch: Launch | None = None
    is_over: bool = False


class Attempts(Service):
    """Calls of runners."""

    def __init__(self, *arguments: Any, bell: Bell, grace_s: float = 300.0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bell = bell
        self._grace_s = grace_s

    async def beat(
        self,
        actor: Actor,
        job_id: str,
        number: int,
        *,
        is_running: bool,
        cost_usd: float,
        saved_at: int | None = None,
        note: str = "",
        protocol: int = PROTOCOL,
        saves: Sequence[Mapping[str, Any]] = (),
        gpus: Sequence[Mapping[str, Any]] = (),
    ) -> RunnerOrder:
        """Renew the lease of an attempt, and collect its command.

        Args:
            actor: The runner.
            job_id: The job.
            number: Number of the attempt.
            is_running: Whether its pool is open.
            cost_usd: Cost so far.
            saved_at: Time of its last checkpoint by the hub's clock, in milliseconds since 1970.
            note: State of its machines in words, until they are ready.
            protocol: Version of its messages.
            saves: Notes of its training about saves: `number`, `path`, `step`, `bytes`, `seconds` and `age_s`.
            gpus: Load of its GPUs: `node`, `gpu`, `busy`, `memory_used_gib`, `memory_gib` and `celsius`.

        Raises:
            Refusal: The attempt is over, or another runner's.
        """
        actor.require(Right.WRITE)
        check_protocol(protocol)
        beat = (is_running, cost_usd, saved_at, note, saves, gpus)
        return await self.database.write(self._beat, actor, job_id, number, *beat)

    async def add_to_feed(self, actor: Actor, job_id: str, number: int, feed: Feed, start: int, body: bytes) -> int:
        """Add output or items that begin at the offset `start`, and return how many bytes the hub has.

        Bytes that it has already count once, so a runner may send again. Behind a gap nothing is added.
        """
        actor.require(Right.WRITE)
        return await self.database.write(self._add_to_feed, actor, job_id, number, feed, start, body)

    async def put_result(
        self, actor: Actor, job_id: str, number: int, name: str, stream: AsyncIterable[bytes], size: int | None = None
    ) -> None:
        """Store the packed value or exception of an attempt. It counts once the attempt has ended with it."""
        actor.require(Right.WRITE)
        if name not in BLOBS[2:]:
            raise Refusal(Reason.MISSING, f"name={name[:40]!r}: no such result; send 'value' or 'error'", field="name")
        await self.database.read(need_attempt, actor, job_id, number)
        if self.blobs is None:
            raise Refusal(Reason.UNSUPPORTED, "jobs: this hub keeps no bytes; configure a place for blobs")
        sha256, length = await receive_blob(self.blobs, stream, None, size, None)
        await self.database.write(_keep_result, actor, job_id, number, name, sha256, length)

    async def end(
        self,
        actor: Actor,
        job_id: str,
        number: int,
        end: AttemptEnd,
        *,
        error: str = "",
        cost_usd: float = 0.0,
        keeps: bool = False,
        may_retry: bool = True,
    ) -> None:
        """End an attempt by its runner's word. Saying it again changes nothing.

        Its machines are gone. With `keeps`, the runner still has them, and asks for the next attempt; see `next`.
        Without `may_retry`, an error of its function spends all retries.
        """
        actor.require(Right.WRITE)
        await self.database.write(self._end, actor, job_id, number, end, error, cost_usd, keeps, may_retry)

    async def next(
        self, actor: Actor, job_id: str, number: int, *, idle_cost_usd: float = 0.0, wait_s: float = 0.0
    ) -> NextOrder:
        """Ask for the next attempt, as a runner that waits with its machines.

        Args:
            actor: The runner.
            job_id: The job for which the runner was started.
            number: Number of that attempt.
            idle_cost_usd: Cost of its time of waiting so far.
            wait_s: Seconds to wait for an attempt.

        Raises:
            Refusal: The runner has been given up.
        """
        actor.require(Right.WRITE)
        deadline, is_first = time.monotonic() + wait_s, True
        while True:
            seen = self._bell.count
            left_s = deadline - time.monotonic()
            is_last = left_s <= 0 or self._bell.is_closed
            # The first look and the last one renew its lease.
            if is_first or is_last or await self.database.read(_has_next, actor, job_id, number, self.clock()):
                order = await self.database.write(self._next, actor, job_id, number, idle_cost_usd)
                if order.launch or order.is_over or is_last:
                    return order
            is_first = False
            await self._bell.wait(seen, min(_LOOK_S, max(0.0, left_s)))

    async def give_back(self, actor: Actor, job_id: str, number: int, *, idle_cost_usd: float = 0.0) -> None:
        """Note that a runner that waited has ended its machines."""
        actor.require(Right.WRITE)
        await self.database.write(self._give_back, actor, job_id, number, idle_cost_usd)

    # Transactions -----------------------------------------------------------------------------------------------------

    def _beat(
        self,
        tx: Transaction,
        actor: Actor,
        job_id: str,
        number: int,
        is_running: bool,
        cost_usd: float,
        saved_at: int | None,
        note: str,
        saves: Sequence[Mapping[str, Any]],
        gpus: Sequence[Mapping[str, Any]],
    ) -> RunnerOrder:
        job, attempt = need_attempt(tx, actor, job_id, number, for_update=tx.for_update)
        attempt.heard_at = tx.now
        note_cost(tx, job, attempt, cost_usd)
        if saved_at is not None and saved_at > (attempt.saved_at or 0):
            attempt.saved_at = saved_at
            announce(tx, job, "job.saved")
        if note and not attempt.command and job.state == JobState.STARTING and job.why != (why := f"starts: {note}"):
            job.why = why
            jobs.update_job(tx, job)
        note_saves(tx, job, attempt, saves)
        note_gpus(tx, job, attempt, gpus)
        if is_running and attempt.began_at is None:
            attempt.began_at = tx.now
            if job.state == JobState.STARTING:
                enter(tx, job, JobState.RUNNING)
                jobs.update_job(tx, job)
        attempts.update_attempt(tx, attempt)
        grace_s = self._grace_s if attempt.ends_by is None else max(0.0, (attempt.ends_by - tx.now) / 1000)
        return RunnerOrder(command=attempt.command, number=attempt.command_number, grace_s=grace_s, now=tx.now)

    def _add_to_feed(
        self, tx: Transaction, actor: Actor, job_id: str, number: int, feed: Feed, start: int, body: bytes
    ) -> int:
        _, attempt = need_attempt(tx, actor, job_id, number, for_update=tx.for_update)
        if start <= attempt.size_of(feed) < start + len(body):
            attempts.add_to_feed(tx, attempt, feed, start, body)
            attempts.update_attempt(tx, attempt)
            tx.after_commit(self._bell.ring_quietly)
        return attempt.size_of(feed)

    def _end(
        self,
        tx: Transaction,
        actor: Actor,
        job_id: str,
        number: int,
        end: AttemptEnd,
        error: str,
        cost_usd: float,
        keeps: bool,
        may_retry: bool,
    ) -> None:
        require_no_run_token(actor)
        job = need_job(tx, actor, job_id, for_update=tx.for_update)
        attempt = attempts.find_attempt(tx, job.pk, number)
        if attempt is None or (attempt.ended_at is not None and attempt.outcome != end):
            raise stale(job_id, number)
        if attempt.ended_at is not None:  # the answer was lost, and the runner says it again
            return
        _check_runner(actor, job, attempt)
        if end is AttemptEnd.COMPLETED and "value" not in jobs.blobs_of(tx, job.pk):
            raise Refusal(Reason.CONFLICT, f"job={job_id}: has no value; send it first", field="end")
        if end is AttemptEnd.NO_CAPACITY:
            machine_sets.set_full(tx, attempt.machines, tx.now + int(FULL_S * 1000))
        note_cost(tx, job, attempt, cost_usd)
        keep_s = self._keep_s(tx, job, attempt) if keeps else None
        finish_attempt(tx, job, attempt, end, error, keep_s=keep_s, may_retry=may_retry)
        tx.after_commit(self._bell.ring)

    def _keep_s(self, tx: Transaction, job: JobRow, attempt: AttemptRow) -> float:
        machines = machines_named(tx, attempt.machines)
        return 0.0 if machines is None else kept_s(job.decoded_spec(), machines)

    def _next(self, tx: Transaction, actor: Actor, job_id: str, number: int, idle_cost_usd: float) -> NextOrder:
        runner = _need_runner(tx, actor, job_id, number)
        runner.heard_at = tx.now
        note_idle_cost(tx, need_job(tx, actor, job_id), runner, idle_cost_usd)
        served = attempts.attempt_served(tx, runner.pk)
        is_over = runner.command == CLOSE or (runner.kept_until or 0) <= tx.now
        if served is None and is_over:
            close(tx, runner)
        attempts.update_attempt(tx, runner)
        if served is None:
            return NextOrder(is_over=is_over)
        job, attempt = served
        if job.state not in (JobState.RESERVED, JobState.STARTING):
            raise stale(job_id, number)
        tx.after_commit(self._bell.ring_quietly)
        launch = claim(tx, actor, attempt.launcher, job, attempt, self._grace_s)
        return NextOrder(launch=launch, is_over=launch is None)

    def _give_back(self, tx: Transaction, actor: Actor, job_id: str, number: int, idle_cost_usd: float) -> None:
        runner = _need_runner(tx, actor, job_id, number)
        note_idle_cost(tx, need_job(tx, actor, job_id), runner, idle_cost_usd)
        served = attempts.attempt_served(tx, runner.pk)
        if served is not None:  # it was chosen in the moment in which it ended
            finish_attempt(tx, *served, AttemptEnd.WITHDRAWN)
        give_back(tx, runner)
        tx.after_commit(self._bell.ring)


def _has_next(snapshot: ReadSnapshot, actor: Actor, job_id: str, number: int, now: int) -> bool:
    """Look whether a runner that waits has an order, because most looks find none."""
    runner = _need_runner(snapshot, actor, job_id, number)
    is_over = runner.command == CLOSE or (runner.kept_until or 0) <= now
    return is_over or attempts.attempt_served(snapshot, runner.pk) is not None


def _need_runner(snapshot: ReadSnapshot, actor: Actor, job_id: str, number: int) -> AttemptRow:
    """Return the attempt that stands for a runner that waits, or that was just given an attempt.

    Raises:
        Refusal: It has been given up, or is another's.
    """
    require_no_run_token(actor)
    job = need_job(snapshot, actor, job_id)
    runner = attempts.find_attempt(snapshot, job.pk, number)
    if runner is None or runner.ended_at is None or runner.free_at is not None or actor.token != runner.token:
        raise stale(job_id, number)
    if runner.kept_until is None and attempts.attempt_served(snapshot, runner.pk) is None:
        raise stale(job_id, number)
    return runner


def need_attempt(
    snapshot: ReadSnapshot, actor: Actor, job_id: str, number: int, *, for_update: str = ""
) -> tuple[JobRow, AttemptRow]:
    """Return a job and its attempt of this number, which is not over and has this runner.

    Raises:
        Refusal: The attempt is stale, or another runner's.
    """
    require_no_run_token(actor)
    job = need_job(snapshot, actor, job_id, for_update=for_update)
    attempt = attempts.find_attempt(snapshot, job.pk, number)
    if attempt is None:
        raise stale(job_id, number)
    _check_runner(actor, job, attempt)
    return job, attempt


def stale(job_id: str, number: int) -> Refusal:
    return Refusal(
        Reason.CONFLICT,
        f"attempt={number}: is over, or has another runner; end the machines of job {job_id[:40]}",
        field="attempt",
    )


def _check_runner(actor: Actor, job: JobRow, attempt: AttemptRow) -> None:
    is_over = attempt.ended_at is not None or job.state in (JobState.RESERVED, JobState.LOST)
    if is_over or actor.token != attempt.token:
        raise stale(job.id, attempt.number)


def _keep_result(tx: Transaction, actor: Actor, job_id: str, number: int, name: str, sha256: str, size: int) -> None:
    job, _ = need_attempt(tx, actor, job_id, number, for_update=tx.for_update)
    artifacts.add_blob(tx, job.project, sha256, size)
    jobs.set_blob(tx, job.pk, name, sha256, size)
