"""Jobs as their users see them: submitted, listed, followed, and told what to do."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...model.access import Actor, Right, Role
from ...model.jobs import BLOBS, Feed, JobPriority, JobRecord, JobSpec, JobState
from ...model.notices import NoticeRules
from ...model.pages import Page, decode_token, encode_token
from ...model.quotas import Limit, Quota
from ...model.refusal import Reason, Refusal
from ...store import artifacts, attempts, jobs, quotas, sweeps
from ...store.attempts import AttemptRow
from ...store.jobs import JobRow
from ...store.transaction import ReadSnapshot, Transaction
from ..bell import Bell
from ..calls import Service, require_delete, require_no_run_token
from ..leader import Write
from ..receiving import receive_blob
from ..sweeps import need_sweep
from .command_checks import check_command, check_driver
from .job_records import list_jobs, need_job, record_of, whole_job
from .kept import close, warm_of
from .life import cancel_job, end_trials, enter
from .notices import check_notify
from .triggers import add_dependencies, check_triggers, prepare_waiting, settle_dependencies

TYPES = ("training", "evaluation", "conversion", "other")
NO_NOTICES = NoticeRules()
_KEY = re.compile(r"[\w.:-]{1,128}")
KEPT_DAYS = 30.0
"""Days for which values, items, output and code of a job are kept after its end."""
_FORGOTTEN = 100
"""Jobs of one transaction, so that writers of a server wait for little."""
_STILL_S = 15.0
"""Seconds without a byte after which a follower gets a sign of life."""
_LOOK_S = 1.0
"""Seconds between two looks for output of a runner that another server heard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job that is handed in.

    Attributes:
        blobs: Name -> hash of bytes that the project has; see `model.jobs.BLOBS`.
        key: Text of the client. A second job of the same key is the first one.
    """

    name: str
    spec: JobSpec
    blobs: Mapping[str, str] = field(default_factory=dict)
    type: str = "other"
    priority: JobPriority = JobPriority.MEDIUM
    is_held: bool = False
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPiece:
    """Output or items of an attempt from a byte on. No bytes: a sign of life.

    Attributes:
        attempt: Number of the attempt.
        start: Offset of the first byte.
    """

    attempt: int
    start: int
    body: bytes


class Jobs(Service):
    """Calls about jobs. Each change wakes the scheduler by the bell."""

    def __init__(
        self,
        *arguments: Any,
        bell: Bell,
        kept_days: float = KEPT_DAYS,
        rules: NoticeRules = NO_NOTICES,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._bell, self._kept_days, self._rules = bell, kept_days, rules

    async def put_job_blob(
        self, actor: Actor, sha256: str, stream: AsyncIterable[bytes], size: int | None = None
    ) -> int:
        """Store bytes that a job will name, and return their number. They must have this SHA-256."""
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        if self.blobs is None:
            raise Refusal(Reason.UNSUPPORTED, "jobs: this hub keeps no bytes; configure a place for blobs")
        room = await self.database.read(_room_for_blob, actor, sha256.lower())
        _, length = await receive_blob(self.blobs, stream, sha256, size, room)
        await self.database.write(self._keep_blob, actor, sha256.lower(), length)
        return length

    async def submit(self, actor: Actor, new: NewJob) -> JobRecord:
        """Accept a job. With a key that the project knows, return the job that has it, as it is now."""
        actor.require(Right.WRITE)
        require_no_run_token(actor)
        _check_new(actor, new)
        check_notify(new.spec, self._rules)
        return await self.database.write(self._submit, actor, new)

    async def jobs(
        self,
        actor: Actor,
        limit: int,
        page_token: str | None = None,
        states: Sequence[JobState] = (),
        sweep: int | None = None,
        with_trials: bool = True,
    ) -> Page[JobRecord]:
        """Return jobs of the project, the newest first, without their attempts.

        With `sweep` only those of its trials, and without `with_trials` none of a trial.
        """
        actor.require(Right.READ)
        require_no_run_token(actor)
        before = None if page_token is None else decode_token(page_token, (int,))[0]
        wanted = (actor.project, limit + 1, before, states, sweep, with_trials)
        rows = await self.database.read(list_jobs, *wanted)
        token = encode_token([rows[limit - 1][0].pk]) if len(rows) > limit else None
        return Page([record_of(row, saved_at=saved_at) for row, saved_at in rows[:limit]], token)

    async def job(self, actor: Actor, job_id: str) -> JobRecord:
        """Return a job with its attempts."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self.database.read(whole_job, actor, job_id)

    async def cancel(self, actor: Actor, job_id: str) -> JobRecord:
        """End a job for good: at once if it waits, otherwise when its runner has ended its machines."""
        return await self._change(actor, job_id, "job.cancel", _cancel)

    async def save(self, actor: Actor, job_id: str) -> JobRecord:
        """Tell a running job to save a checkpoint and go on."""
        return await self._change(actor, job_id, "job.save", _save)

    async def retry(self, actor: Actor, job_id: str) -> JobRecord:
        """Let a job that failed, was cancelled or took too long begin again, with all its retries."""
        return await self._change(actor, job_id, "job.retry", _retry)

    async def hold(self, actor: Actor, job_id: str) -> JobRecord:
        """Keep a waiting job from beginning, until it is released."""
        return await self._change(actor, job_id, "job.hold", _hold)

    async def release(self, actor: Actor, job_id: str) -> JobRecord:
        """Let a held job begin when its turn comes."""
        return await self._change(actor, job_id, "job.release", _release)

    async def delete(self, actor: Actor, job_id: str) -> None:
        """Delete a job that is over, with its output and its value."""
        require_no_run_token(actor)
        actor.require(Right.WRITE)
        await self.database.write(self._close_runner, actor, job_id)
        await self.database.write(self._delete, actor, job_id)

    async def open_blob(self, actor: Actor, job_id: str, name: str) -> tuple[int, Iterator[bytes]]:
        """Return the size of a blob of a job and its bytes. The iterator blocks: run it on a thread."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        sha256, size = await self.database.read(_blob, actor, job_id, name)
        if self.blobs is None:
            raise Refusal(Reason.UNSUPPORTED, "jobs: this hub keeps no bytes; configure a place for blobs")
        return size, await asyncio.to_thread(self.blobs.open, sha256)

    async def follow(
        self,
        actor: Actor,
        job_id: str,
        *,
        feed: Feed = "output",
        attempt: int | None = None,
        start: int = 0,
        ends: bool = False,
    ) -> AsyncGenerator[FeedPiece, None]:
        """Yield the output or the items of a job, attempt after attempt, until the job is over.

        Args:
            actor: Who asks.
            job_id: The job.
            feed: Whether its output or the items of its generator.
            attempt: Number of the first attempt. None: the first one of all.
            start: Offset in it of the first byte.
            ends: Whether to end with the bytes that are there now.

        Raises:
            Refusal: There is no such job.
        """
        actor.require(Right.READ)
        require_no_run_token(actor)
        number, quiet_s = attempt or 1, 0.0
        while not self._bell.is_closed:
            seen = self._bell.count
            state, row, body = await self.database.read(_fed, actor, job_id, feed, number, start)
            if body:
                quiet_s = 0.0
                yield FeedPiece(attempt=number, start=start, body=body)
                start += len(body)
            elif row is not None and row.ended_at is not None and state.attempts > number:
                number, start = number + 1, 0
            elif ends or state.ended_at is not None:
                return
            else:
                await self._bell.wait(seen, _LOOK_S)
                quiet_s += _LOOK_S
                if quiet_s >= _STILL_S:
                    quiet_s = 0.0
                    yield FeedPiece(attempt=number, start=start, body=b"")

    async def forget_old(self, *, write: Write) -> int:
        """Delete the values, items, output and code of jobs that ended long ago, and return the number of these jobs.

        The jobs stay, with their attempts and costs. `skyward hub gc` takes the bytes that nothing names any longer.

        Args:
            write: That of a leader.
        """
        count = 0
        before = self.clock() - int(self._kept_days * 86_400_000)
        while forgotten := await write(_forget_old, before):
            count += forgotten
        return count

    # Transactions -----------------------------------------------------------------------------------------------------

    async def _change(
        self, actor: Actor, job_id: str, action: str, change: Callable[[Transaction, JobRow], None]
    ) -> JobRecord:
        actor.require(Right.WRITE)
        require_no_run_token(actor)

        def apply(tx: Transaction) -> JobRecord:
            row = need_job(tx, actor, job_id, for_update=tx.for_update)
            require_delete_or_own(actor, row)
            require_no_driver(tx, actor, row)
            change(tx, row)
            self.on_change(tx, actor, action, f"job/{job_id}", {"name": row.name})
            tx.after_commit(self._bell.ring)
            return whole_job(tx, actor, job_id)

        return await self.database.write(apply)

    def _keep_blob(self, tx: Transaction, actor: Actor, sha256: str, size: int) -> None:
        artifacts.add_blob(tx, actor.project, sha256, size)
        self.on_change(tx, actor, "job.upload", f"blob/{sha256}", {"size": size})

    def _submit(self, tx: Transaction, actor: Actor, new: NewJob) -> JobRecord:
        require_no_driver(tx, actor)
        known = None if new.key is None else jobs.find_job_by_key(tx, actor.project, new.key)
        if known is not None:
            return whole_job(tx, actor, known.id)
        row = JobRow(
            project=actor.project,
            id=uuid.uuid4().hex,
            key=new.key,
            name=new.name,
            type=new.type,
            owner=actor.user,
            is_held=new.is_held,
            priority=int(new.priority),
            spec=jobs.encoded_spec(new.spec),
            created_at=tx.now,
            why="is held; release it" if new.is_held else "",
        )
        row.warm = warm_of(actor.project, actor.user, new.spec, new.blobs.get("code", ""))
        prepare_waiting(tx, row, new.spec)
        jobs.add_job(tx, row)
        if new.spec.after:
            add_dependencies(tx, row, [need_job(tx, actor, other) for other in new.spec.after])
            jobs.update_job(tx, row)
        for name, sha256 in new.blobs.items():
            size = _size_of_blob(tx, actor, name, sha256.lower())
            jobs.set_blob(tx, row.pk, name, sha256.lower(), size)
        if new.spec.sweep is not None:
            sweep = need_sweep(tx, actor, new.spec.sweep, end=tx.for_update)
            sweeps.set_sweep_attrs(tx, sweep, {}, {sweeps.JOB: json.dumps(row.id)})
        self.on_change(tx, actor, "job.create", f"job/{row.id}", {"name": row.name, "nodes": new.spec.nodes})
        tx.after_commit(self._bell.ring)
        return whole_job(tx, actor, row.id)

    def _close_runner(self, tx: Transaction, actor: Actor, job_id: str) -> None:
        """Let the machines that a job has left for others end, because its runner ends with its rows."""
        row = need_job(tx, actor, job_id)
        require_delete_or_own(actor, row)
        for job, runner in attempts.kept_attempts(tx):
            if job.pk == row.pk:
                close(tx, runner)
                tx.after_commit(self._bell.ring)

    def _delete(self, tx: Transaction, actor: Actor, job_id: str) -> None:
        row = need_job(tx, actor, job_id, for_update=tx.for_update)
        require_delete_or_own(actor, row)
        require_no_driver(tx, actor)
        if not JobState(row.state).is_final:
            raise _conflict(row, "is not over; cancel it first")
        if attempts.has_runner(tx, row.pk):
            raise _conflict(row, "its runner has machines that wait or serve another job; delete it a little later")
        settle_dependencies(tx)  # those that wait for it must hear how it ended
        jobs.delete_job(tx, row.pk)
        self.on_change(tx, actor, "job.delete", f"job/{job_id}", {"name": row.name})


def _forget_old(tx: Transaction, before: int) -> int:
    old = jobs.old_jobs(tx, before, _FORGOTTEN)
    for job in old:
        jobs.drop_bytes(tx, job)
    return len(old)


def require_delete_or_own(actor: Actor, row: JobRow) -> None:
    """Check that the actor may change a job: one's own, or any as an admin."""
    require_delete(actor, row.owner)


def require_no_driver(snapshot: ReadSnapshot, actor: Actor, row: JobRow | None = None) -> None:
    """Refuse the token of a sweep's driver, unless it changes a job of its own sweep.

    It works for days without anybody who looks, so a stolen one shall be worth little.
    """
    driver = None if actor.token is None else attempts.job_of_token(snapshot, actor.token)
    if driver is None or driver.decoded_spec().trials is None:
        return
    own = jobs.trial_key(driver.decoded_spec().sweep or 0, 0)[:-1]
    if row is None or row.project != driver.project or not (row.key or "").startswith(own):
        problem = "token: is of a sweep's driver, and only for jobs of its trials; use one of a person"
        raise Refusal(Reason.FORBIDDEN, problem, field="token")


# Changes --------------------------------------------------------------------------------------------------------------


def _cancel(tx: Transaction, row: JobRow) -> None:
    if JobState(row.state).is_final:
        raise _conflict(row, "is over already; see why it ended")
    cancel_job(tx, row)
    end_trials(tx, row)


def _save(tx: Transaction, row: JobRow) -> None:
    if row.decoded_spec().command:
        raise _conflict(row, "runs a command, which saves when it gets SIGTERM; cancel or preempt it instead")
    if row.decoded_spec().trials is not None:
        raise _conflict(row, "drives a sweep, which has nothing to save; save the jobs of its trials instead")
    attempt = attempts.active_attempt(tx, row.pk)
    if row.state != JobState.RUNNING or attempt is None or attempt.command not in ("", "save"):
        raise _conflict(row, "does not run, so it has nothing to save; wait until it does")
    attempt.order("save")
    attempts.update_attempt(tx, attempt)


def _retry(tx: Transaction, row: JobRow) -> None:
    if row.state not in (JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT):
        raise _conflict(row, "has neither failed nor been cancelled; submit another job instead")
    begin_again(tx, row)


def begin_again(tx: Transaction, row: JobRow) -> None:
    """Let a job that is over wait again, with all its retries."""
    has_code = "code" in jobs.blobs_of(tx, row.pk)
    if row.decoded_spec().code_path and not has_code:
        raise _conflict(row, "its code is no longer kept; submit it again")
    enter(tx, row, JobState.QUEUED)
    row.ends_as, row.not_before = None, 0
    row.user_failures = row.start_failures = row.losses = 0
    jobs.drop_results(tx, row.pk)
    spec = row.decoded_spec()
    prepare_waiting(tx, row, spec)
    others = [jobs.find_job(tx, row.project, other) for other in spec.after]
    add_dependencies(tx, row, [other for other in others if other is not None])
    jobs.update_job(tx, row)


def _hold(tx: Transaction, row: JobRow) -> None:
    if row.state != JobState.QUEUED:
        raise _conflict(row, "does not wait, so it cannot be held; cancel it instead")
    row.is_held, row.has_turn, row.why = True, False, "is held; release it"
    jobs.update_job(tx, row)


def _release(tx: Transaction, row: JobRow) -> None:
    if row.is_held:
        row.is_held, row.why = False, ""
        prepare_waiting(tx, row, row.decoded_spec())
        jobs.update_job(tx, row)


def _conflict(row: JobRow, problem: str) -> Refusal:
    return Refusal(Reason.CONFLICT, f"job={row.id}: is {row.state} and {problem}", field="job")


# Checks ---------------------------------------------------------------------------------------------------------------


def _check_new(actor: Actor, new: NewJob) -> None:
    if not 1 <= len(new.name) <= 200:
        raise Refusal(Reason.INVALID, "name: empty or too long; use 1 to 200 characters", field="name")
    if new.type not in TYPES:
        raise Refusal(Reason.INVALID, f"type={new.type[:40]!r}: unknown; use one of {', '.join(TYPES)}", field="type")
    if new.key is not None and not _KEY.fullmatch(new.key):
        raise Refusal(Reason.INVALID, "key: not 1 to 128 letters, digits, '.', ':', '_' and '-'; mend it", field="key")
    if new.priority is JobPriority.HIGH and actor.role < Role.ADMIN:
        raise Refusal(
            Reason.FORBIDDEN, "priority=high: only an admin may raise a job; use medium or low", field="priority"
        )
    known = BLOBS[:1] if new.spec.command or new.spec.operation else BLOBS[:2]
    wrong = [name for name in new.blobs if name not in known]
    if wrong:
        raise Refusal(Reason.INVALID, f"blobs.{wrong[0][:40]}: unknown here; use {' and '.join(known)}", field="blobs")
    check_command(new.spec)
    check_driver(new.spec)
    check_triggers(new.spec)


def _room_for_blob(snapshot: ReadSnapshot, actor: Actor, sha256: str) -> Limit | None:
    require_no_driver(snapshot, actor)
    if artifacts.knows_blob(snapshot, actor.project, sha256):
        return None
    return quotas.find_limit(snapshot, actor.project, Quota.ARTIFACT_BYTES)


def _size_of_blob(snapshot: ReadSnapshot, actor: Actor, name: str, sha256: str) -> int:
    row = snapshot.execute("SELECT size FROM blob WHERE project = ? AND sha256 = ?", (actor.project, sha256)).fetchone()
    if row is None:
        raise Refusal(
            Reason.INVALID,
            f"blobs.{name}={sha256[:80]!r}: the project has no such bytes; upload them first",
            field=f"blobs.{name}",
        )
    return int(row[0])


# Reading --------------------------------------------------------------------------------------------------------------


def _blob(snapshot: ReadSnapshot, actor: Actor, job_id: str, name: str) -> tuple[str, int]:
    row = need_job(snapshot, actor, job_id)
    found = jobs.blobs_of(snapshot, row.pk).get(name)
    if found is None:
        raise Refusal(
            Reason.MISSING,
            f"name={name[:40]!r}: the job has no such bytes, or they were too old; see its results",
            field="name",
        )
    return found


def _fed(
    snapshot: ReadSnapshot, actor: Actor, job_id: str, feed: Feed, number: int, start: int
) -> tuple[JobRow, AttemptRow | None, bytes]:
    row = need_job(snapshot, actor, job_id)
    attempt = attempts.find_attempt(snapshot, row.pk, number)
    if attempt is None or attempt.size_of(feed) <= start:
        return row, attempt, b""
    return row, attempt, attempts.read_feed(snapshot, attempt.pk, feed, start)
