"""Attempts as launchers and runners see them: taken, started, followed by messages, and ended.

Every message of a runner carries the number of its attempt, and the token that was made for it. One that is stale is
refused with CONFLICT or MISSING, and its runner ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...model.access import Actor, Right, Role
from ...model.capacity import MachineSetSpec
from ...model.jobs import BLOBS, PROTOCOL, AttemptEnd, JobSpec, JobState
from ...model.refusal import Reason, Refusal
from ...model.tokens import new_token
from ...store import artifacts, attempts, identities, jobs, machine_sets
from ...store.attempts import AttemptRow
from ...store.jobs import JobRow
from ...store.transaction import ReadSnapshot, Transaction
from ..bell import Bell
from ..calls import Service, require_no_run_token
from ..receiving import receive_blob
from .gpu_use import note_gpus
from .jobs import need_job
from .kept import CLOSE, close, give_back, kept_s, lose_kept
from .life import announce, enter, finish_attempt, lease_s, lose_runner, machines_named, note_cost, note_idle_cost
from .protocol import check_protocol, explain_older, needs_newer, note_newest, understands
from .saves import note_saves

SILENT_S = 60.0
"""Seconds of silence after which the launcher of a runner is told to kill it."""
FULL_S = 60.0
"""Seconds for which a provider without machines is not asked again."""
_LOOK_S = 1.0
AttemptKey = tuple[str, int]
"""Id of a job, and number of an attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything that a runner needs to begin.

    Attributes:
        token: Its token; empty on a hub without authentication.
        nodes: Numbers of its nodes within the set.
        devices: Numbers of its devices on each of its nodes; empty for all.
        keep_s: Seconds for which its runner waits with the machines for the next attempt; 0 for not at all.
        code: SHA-256 of its code; empty for none.
    """

    job: str
    attempt: int
    name: str
    project: str
    token: str
    spec: JobSpec
    machines: MachineSetSpec
    nodes: Sequence[int]
    devices: Sequence[int] = ()
    grace_s: float
    keep_s: float = 0.0
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherOrders:
    """Answer to a launcher.

    Attributes:
        start: Attempts whose runners it must start.
        kill: Runners that are silent, and must be killed.
        forget: Attempts that are over; when their process is gone, nothing needs their folder.
    """

    start: Sequence[Launch] = ()
    kill: Sequence[AttemptKey] = ()
    forget: Sequence[AttemptKey] = ()


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
    """Calls of launchers and runners."""

    def __init__(self, *arguments: Any, bell: Bell, grace_s: float = 300.0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bell = bell
        self._grace_s = grace_s
        self._polls: dict[str, object] = {}
        """Launcher -> its newest poll."""

    async def poll(
        self,
        actor: Actor,
        launcher: str,
        *,
        machines: Sequence[str] = (),
        known: Collection[AttemptKey] = (),
        gone: Collection[AttemptKey] = (),
        wait_s: float = 0.0,
        protocol: int = PROTOCOL,
    ) -> LauncherOrders:
        """Tell the hub which runners of a launcher live, and collect what it must do.

        Args:
            actor: An owner: launchers start jobs of all projects.
            launcher: Its name, which no other one has.
            machines: Names of the sets that it serves; empty for all.
            known: Attempts whose process it has started, the dead ones among them.
            gone: Those of `known` whose process is gone.
            wait_s: Seconds to wait for something to do.
            protocol: Version of its messages.
        """
        actor.require(Right.OWN)
        check_protocol(protocol)
        deadline = time.monotonic() + wait_s
        poll = self._polls[launcher] = object()
        while True:
            seen = self._bell.count
            told = (launcher, machines, protocol, set(known), set(gone))
            # A launcher that was killed left its poll here, which knows nothing of what the next one has started.
            if self._polls[launcher] is poll and await self.database.read(self._has_orders, *told):
                orders = await self.database.write(self._poll, actor, *told)
                if orders.start or orders.kill or orders.forget:
                    return orders
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._bell.is_closed:
                return LauncherOrders()
            await self._bell.wait(seen, min(_LOOK_S, left_s))

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

    async def add_output(self, actor: Actor, job_id: str, number: int, start: int, body: bytes) -> int:
        """Add output that begins at the offset `start`, and return how many bytes the hub has.

        Bytes that it has already count once, so a runner may send again. Behind a gap nothing is added.
        """
        actor.require(Right.WRITE)
        return await self.database.write(self._add_output, actor, job_id, number, start, body)

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

    # Launchers --------------------------------------------------------------------------------------------------------

    def _has_orders(
        self,
        snapshot: ReadSnapshot,
        launcher: str,
        machines: Sequence[str],
        protocol: int,
        known: set[AttemptKey],
        gone: set[AttemptKey],
    ) -> bool:
        """Look whether a launcher has something to do, because most polls find nothing."""
        own: set[AttemptKey] = set()
        for job, attempt in attempts.active_attempts(snapshot):
            key = _runner_key(snapshot, job, attempt)
            if attempt.launcher == launcher:
                own.add(key)
                if key in gone or (key not in known) or self._is_silent(job, attempt, self.clock()):
                    return True
            elif _is_free(job, attempt, machines) and (
                understands(protocol, job.decoded_spec()) or not needs_newer(job)
            ):
                return True
        for job, runner in attempts.kept_attempts(snapshot):
            if runner.launcher == launcher:
                own.add(key := (job.id, runner.number))
                is_gone = key in gone or key not in known
                if runner.free_at is None and (is_gone or self._is_silent(job, runner, self.clock())):
                    return True
        return bool(known - own)

    def _poll(
        self,
        tx: Transaction,
        actor: Actor,
        launcher: str,
        machines: Sequence[str],
        protocol: int,
        known: set[AttemptKey],
        gone: set[AttemptKey],
    ) -> LauncherOrders:
        start, kill, own = [], [], set()
        for job, attempt in attempts.active_attempts(tx, for_update=tx.for_update):
            key = _runner_key(tx, job, attempt)
            if attempt.launcher == launcher:
                own.add(key)
                is_gone = key in gone or (key not in known and attempt.heard_at is not None)
                if is_gone and job.state != JobState.LOST:
                    lose_runner(tx, job, attempt, "runner: its process ended before its attempt did; see its log")
                    tx.after_commit(self._bell.ring)
                elif key not in known and attempt.heard_at is None:  # the answer with this attempt was lost
                    start.append(self._claim(tx, actor, launcher, job, attempt))
                elif self._is_silent(job, attempt, tx.now):
                    kill.append(key)
            elif _is_free(job, attempt, machines):
                if understands(protocol, job.decoded_spec()):
                    note_newest(tx, protocol, attempt.machines)
                    start.append(self._claim(tx, actor, launcher, job, attempt))
                elif not needs_newer(job):
                    explain_older(tx, launcher, job, attempt)
        kill += self._kept_orders(tx, launcher, known, gone, own)
        return LauncherOrders(
            start=[launch for launch in start if launch is not None], kill=kill, forget=sorted(known - own)
        )

    def _kept_orders(
        self, tx: Transaction, launcher: str, known: set[AttemptKey], gone: set[AttemptKey], own: set[AttemptKey]
    ) -> list[AttemptKey]:
        """Look after the runners of a launcher that wait: add them to `own`, and return those that are silent."""
        silent = []
        for job, runner in attempts.kept_attempts(tx, for_update=tx.for_update):
            if runner.launcher != launcher:
                continue
            own.add(key := (job.id, runner.number))
            if key in gone or key not in known:
                lose_kept(tx, runner, lease_s(tx, runner.machines))
            elif runner.free_at is None and self._is_silent(job, runner, tx.now):
                silent.append(key)
        return silent

    def _is_silent(self, job: JobRow, attempt: AttemptRow, now: int) -> bool:
        if attempt.heard_at is None or job.state == JobState.LOST:
            return False
        return now - max(attempt.heard_at, self.listening_since) > SILENT_S * 1000

    def _claim(
        self, tx: Transaction, actor: Actor, launcher: str | None, job: JobRow, attempt: AttemptRow
    ) -> Launch | None:
        """Give an attempt to a launcher, with a token that acts as the job's user until the attempt is over."""
        machines = machines_named(tx, attempt.machines)
        if machines is None:
            finish_attempt(tx, job, attempt, AttemptEnd.NO_CAPACITY, f"machines={attempt.machines}: the set is gone")
            return None
        if job.state == JobState.RESERVED:
            enter(tx, job, JobState.STARTING)
        if attempt.token is not None:
            identities.delete_token(tx, attempt.token)
        attempt.launcher, attempt.claimed_at, attempt.token = launcher, tx.now, None
        text = ""
        if actor.token is not None:
            attempt.token, text = _make_token(tx, actor, job, attempt)
        attempts.update_attempt(tx, attempt)
        jobs.update_job(tx, job)
        return Launch(
            job=job.id,
            attempt=attempt.number,
            name=job.name,
            project=str(identities.name_of_project(tx, job.project)),
            token=text,
            spec=job.decoded_spec(),
            machines=machines,
            nodes=attempt.node_numbers,
            devices=attempt.device_numbers,
            grace_s=self._grace_s,
            keep_s=kept_s(job.decoded_spec(), machines) if job.warm else 0.0,
            code=jobs.blobs_of(tx, job.pk).get("code", ("", 0))[0],
        )

    # Runners ----------------------------------------------------------------------------------------------------------

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

    def _add_output(self, tx: Transaction, actor: Actor, job_id: str, number: int, start: int, body: bytes) -> int:
        _, attempt = need_attempt(tx, actor, job_id, number, for_update=tx.for_update)
        if start <= attempt.output < start + len(body):
            attempts.add_output(tx, attempt, start, body)
            attempts.update_attempt(tx, attempt)
            tx.after_commit(self._bell.ring_quietly)
        return attempt.output

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
        launch = self._claim(tx, actor, attempt.launcher, job, attempt)
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


def _runner_key(snapshot: ReadSnapshot, job: JobRow, attempt: AttemptRow) -> AttemptKey:
    """Return the attempt for which the runner of this one was started: launchers know it by that."""
    found = None if attempt.runner is None else attempts.attempt_numbered(snapshot, attempt.runner)
    return (job.id, attempt.number) if found is None else (found[0].id, found[1].number)


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


def _is_free(job: JobRow, attempt: AttemptRow, machines: Sequence[str]) -> bool:
    """Return whether a launcher may take an attempt: its machines are free, and it serves them."""
    is_served = not machines or attempt.machines in machines
    is_new = job.state == JobState.RESERVED and attempt.runner is None
    return is_new and is_served and not json.loads(attempt.waits_for)


def _keep_result(tx: Transaction, actor: Actor, job_id: str, number: int, name: str, sha256: str, size: int) -> None:
    job, _ = need_attempt(tx, actor, job_id, number, for_update=tx.for_update)
    artifacts.add_blob(tx, job.project, sha256, size)
    jobs.set_blob(tx, job.pk, name, sha256, size)


def _make_token(tx: Transaction, actor: Actor, job: JobRow, attempt: AttemptRow) -> tuple[str, str]:
    account = identities.find_account(tx, actor.organization, job.owner)
    if account is None or account.disabled_at is not None:
        account = identities.find_account(tx, actor.organization, actor.user)
    assert account is not None
    token = new_token()
    identities.add_token(
        tx,
        token.id,
        token.sha256,
        kind="job",
        account=account.id,
        name=f"job {job.id} attempt {attempt.number}",
        project=job.project,
        role=int(Role.RESEARCHER),
        run=None,
        expires_at=None,
    )
    return token.id, token.text
