"""Steps of a job's life, within the transaction of whoever takes them: its user, its runner or the scheduler."""

from __future__ import annotations

from collections.abc import Mapping

from ...model.access import Actor, Role
from ...model.capacity import CLOUD_LEASE_S, MachineSetSpec
from ...model.jobs import AttemptEnd, JobSpec, JobState, after_attempt
from ...model.notices import NoticeKind
from ...model.usage import NEVER, bound_of, parts_of_days
from ...schedule.shares import charged, decayed
from ...schedule.values import Policy, Shape
from ...store import attempts, job_quotas, jobs, machine_sets, usage
from ...store.attempts import AttemptRow
from ...store.jobs import JobRow
from ...store.schema import ORGANIZATION
from ...store.transaction import ReadSnapshot, Transaction
from .. import outbox
from .kept import lose_kept, settle_runner
from .notices import notify

HALF_LIFE_S = Policy().half_life_s
NO_FACTS: Mapping[str, object] = {}


def enter(tx: Transaction, job: JobRow, state: JobState) -> None:
    """Change the state of a job and announce it. The caller writes the row."""
    job.enter(state, tx.now)
    if state.is_final:
        seconds = 0.0 if job.started_at is None else max(0, tx.now - job.started_at) / 1000
        bound_s = NEVER if job.started_at is None else bound_of(seconds)
        usage.add_end(tx, job.project, job.type, state, bound_s, seconds)
    announce(tx, job, f"job.{state}")
    if state is JobState.LOST:
        notify(tx, job, NoticeKind.LOST, "its runner is gone; it is tried again when its machines are surely gone")


def notify_end(tx: Transaction, job: JobRow) -> None:
    """Tell the targets of a job that it is over, and why."""
    notify(tx, job, NoticeKind(job.state), job.why or job.state.replace("_", " "))


def announce(tx: Transaction, job: JobRow, kind: str, facts: Mapping[str, object] = NO_FACTS) -> None:
    """Tell pages and hooks what happened to a job."""
    hub = Actor(user="hub", organization=ORGANIZATION, project=job.project, role=Role.OWNER)
    outbox.record(tx, hub, kind, f"job/{job.id}", {"name": job.name, "attempt": job.attempts, **facts})


def finish_attempt(
    tx: Transaction,
    job: JobRow,
    attempt: AttemptRow,
    end: AttemptEnd,
    error: str = "",
    *,
    keep_s: float | None = None,
    may_retry: bool = True,
) -> None:
    """End an attempt, whose machines are free now, and let its job go on as `after_attempt` says.

    Args:
        tx: The transaction.
        job: The job.
        attempt: Its attempt.
        end: How it ended.
        error: Why, in words.
        keep_s: Seconds for which its runner waits with the machines for another attempt; None if they are gone.
        may_retry: Whether the job's retries count for an error of its function.
    """
    attempt.ended_at, attempt.outcome, attempt.command = tx.now, end, ""
    # A runner that was told to end does not know why; whoever told it has noted that.
    attempt.error = attempt.error or error if end is AttemptEnd.STOPPED else error or attempt.error
    settle_runner(tx, attempt, end, keep_s)
    _charge(tx, job, attempt)
    ends_as = None if job.ends_as is None else JobState(job.ends_as)
    retries = job.decoded_spec().retries if may_retry else 0
    after = after_attempt(end, job.failures, retries=retries, ends_as=ends_as)
    job.failures = after.failures
    job.cost += attempt.cost
    job.not_before = tx.now + int(after.pause_s * 1000)
    was_told = job.state == JobState.LOST
    enter(tx, job, after.state)
    if end is not AttemptEnd.COMPLETED:
        job.why = attempt.error
    if after.state.is_final:
        end_trials(tx, job)
        notify_end(tx, job)
    elif end is AttemptEnd.LOST and not was_told:
        notify(tx, job, NoticeKind.LOST, f"{attempt.error}; it is tried again")
    attempts.update_attempt(tx, attempt)
    jobs.update_job(tx, job)


def note_cost(tx: Transaction, job: JobRow, attempt: AttemptRow, usd: float) -> None:
    """Note what an attempt has cost so far, and charge what is new to this day. The caller writes the row."""
    if usd > attempt.cost:
        job_quotas.add_spending(tx, job.project, job.owner, usd - attempt.cost)
        attempt.cost = usd


def note_idle_cost(tx: Transaction, job: JobRow, runner: AttemptRow, usd: float) -> None:
    """Note the cost of machines that wait, and charge what is new to the project and user of the job before.

    The caller writes the row.
    """
    before = runner.idle_cost or 0.0
    if usd > before:
        job_quotas.add_spending(tx, job.project, job.owner, usd - before)
        kind, _ = devices_of(machines_named(tx, runner.machines), job, runner)
        day = next(parts_of_days(tx.now, tx.now))[0]
        usage.add_use(tx, job.project, day, kind, seconds=0.0, cost_usd=usd - before, attempts=0)
        runner.idle_cost = usd


def lose_runner(tx: Transaction, job: JobRow, attempt: AttemptRow, error: str) -> None:
    """Note that the runner of an attempt is gone. Its machines may write until their lease is over."""
    if attempt.heard_at is None:  # it opens no pool before it was heard
        finish_attempt(tx, job, attempt, AttemptEnd.START_FAILED, error)
        return
    if job.state == JobState.RESERVED:  # it was given to a runner that has not heard of it
        finish_attempt(tx, job, attempt, AttemptEnd.WITHDRAWN, error)
        runner = attempts.attempt_numbered(tx, attempt.runner or 0)
        if runner is not None:
            lose_kept(tx, runner[1], lease_s(tx, attempt.machines))
        return
    attempt.error = error
    has_machines = bool(attempt.node_numbers)
    attempt.free_at = tx.now + (int(lease_s(tx, attempt.machines) * 1000) if has_machines else 0)
    enter(tx, job, JobState.LOST)
    job.why = f"{error}; its machines may live on until their lease is over" if has_machines else error
    attempts.update_attempt(tx, attempt)
    jobs.update_job(tx, job)


def release_attempt(tx: Transaction, job: JobRow, attempt: AttemptRow) -> None:
    """Let a job wait again whose attempt no launcher has seen. The attempt never was, and its number is free."""
    attempts.delete_attempt(tx, attempt.pk)
    job.attempts -= 1
    enter(tx, job, JobState.QUEUED)
    jobs.update_job(tx, job)


def stop_attempt(tx: Transaction, job: JobRow, attempt: AttemptRow, reason: str, *, grace_ms: int) -> None:
    """Tell an attempt to save and end. One that no launcher has taken ends at once."""
    if job.state == JobState.RESERVED:
        finish_attempt(tx, job, attempt, AttemptEnd.WITHDRAWN, reason)
        return
    attempt.order("stop")
    attempt.error, attempt.ends_by = reason, tx.now + grace_ms
    enter(tx, job, JobState.PREEMPTING)
    job.why = reason
    attempts.update_attempt(tx, attempt)
    jobs.update_job(tx, job)


def cancel_job(tx: Transaction, row: JobRow) -> None:
    """End a job for good: at once, or when its machines are gone. It is not over yet."""
    row.ends_as = JobState.CANCELLED
    attempt = attempts.active_attempt(tx, row.pk)
    if attempt is None:
        enter(tx, row, JobState.CANCELLED)
        notify_end(tx, row)
    elif row.state == JobState.RESERVED:
        finish_attempt(tx, row, attempt, AttemptEnd.WITHDRAWN)
    else:
        attempt.order("abort")
        row.why = "is being cancelled: its machines end"
        attempts.update_attempt(tx, attempt)
    jobs.update_job(tx, row)


def end_trials(tx: Transaction, driver: JobRow) -> None:
    """Cancel the jobs of the trials that a driver leaves, because it is over or will be."""
    spec = driver.decoded_spec()
    if spec.trials is None or spec.sweep is None:
        return
    for trial in jobs.unfinished_trials(tx, spec.sweep, for_update=tx.for_update):
        if trial.ends_as is None:
            cancel_job(tx, trial)


def cancel_project(tx: Transaction, project: int) -> None:
    """Cancel all jobs of a project that is deleted, and let the machines end that it keeps.

    Its tokens are refused from now on. So its runners end by themselves, and their machines are free with their lease.
    """
    # Trials before their driver, which would cancel them once more.
    for row in sorted(jobs.unfinished_jobs(tx, project, None), key=lambda row: -row.pk):
        cancel_job(tx, row)
    for job, runner in attempts.kept_attempts(tx):
        if job.project == project:
            lose_kept(tx, runner, lease_s(tx, runner.machines))


def shape_of(spec: JobSpec) -> Shape:
    """Return the machines that a job needs, as the scheduler counts them."""
    return Shape(
        nodes=spec.nodes,
        devices=spec.devices,
        accelerator=spec.accelerator,
        vcpus=spec.vcpus,
        memory_gib=spec.memory_gib,
        region=spec.region,
        labels=frozenset(spec.labels),
    )


def machines_named(snapshot: ReadSnapshot, name: str) -> MachineSetSpec | None:
    """Return the machine set of that name; None if it is gone."""
    return next((record.spec for record in machine_sets.machine_sets(snapshot) if record.spec.name == name), None)


def devices_of(machines: MachineSetSpec | None, job: JobRow, attempt: AttemptRow) -> tuple[str, int]:
    """Return the kind of the devices that an attempt holds, and their number on all of its nodes.

    `machines` is None if the set is gone.
    """
    spec = job.decoded_spec()
    each = spec.devices if spec.devices is not None else 1 if machines is None else machines.devices
    kind = spec.accelerator if machines is None else machines.accelerator
    return kind or "node", each * len(attempt.node_numbers)


def lease_s(snapshot: ReadSnapshot, machines: str) -> float:
    """Return the lease of a set's machines. Those of an unknown set get the longest one."""
    spec = machines_named(snapshot, machines)
    return CLOUD_LEASE_S if spec is None else spec.lease_s


def _charge(tx: Transaction, job: JobRow, attempt: AttemptRow) -> None:
    """Count what an attempt used: for the bill, and for its project's share."""
    machines = machines_named(tx, attempt.machines)
    kind, devices = devices_of(machines, job, attempt)
    _count_use(tx, job, attempt, kind, devices)
    if machines is None:
        return
    seconds, at = machine_sets.device_uses(tx).get(job.project, {}).get(kind, (0.0, tx.now))
    earlier = decayed({kind: seconds}, (tx.now - at) / 1000, HALF_LIFE_S)[kind]
    own = charged({}, kind, devices, (tx.now - attempt.reserved_at) / 1000, HALF_LIFE_S)[kind]
    machine_sets.set_device_use(tx, job.project, kind, earlier + own)


def _count_use(tx: Transaction, job: JobRow, attempt: AttemptRow, kind: str, devices: int) -> None:
    """Count devices and money of an attempt by days. It had none before a launcher took it."""
    if attempt.claimed_at is None:
        return
    seconds = devices * max(0, tx.now - attempt.claimed_at) / 1000
    parts = list(parts_of_days(attempt.claimed_at, tx.now))
    for day, part in parts:
        usage.add_use(
            *(tx, job.project, day, kind),
            seconds=seconds * part,
            cost_usd=attempt.cost * part,
            attempts=int(day == parts[-1][0]),
        )
