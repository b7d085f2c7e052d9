"""Changes of waiting jobs that nobody asks for at that moment: dependencies, schedules, and limits of waiting."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import replace

from ....errors import UsageError
from ...model.cron import CronSchedule
from ...model.jobs import JobSpec, JobState
from ...model.refusal import Reason, Refusal
from ...store import dependencies, jobs
from ...store.jobs import JobRow
from ...store.transaction import Transaction
from .life import enter, notify_end
from .notices import notify_waiting


def prepare_waiting(tx: Transaction, row: JobRow, spec: JobSpec) -> None:
    """Note what a job that begins to wait waits for, and for how long. The caller writes the row."""
    has_limit = spec.max_wait_s is not None and not spec.cron
    row.wait_until = tx.now + int((spec.max_wait_s or 0.0) * 1000) if has_limit else None
    tells = spec.notify_wait_s is not None and not spec.cron
    row.tell_at = tx.now + int((spec.notify_wait_s or 0.0) * 1000) if tells else None
    if spec.cron:
        row.cron, row.next_at = spec.cron, CronSchedule(spec.cron).after_ms(tx.now)
        row.why = row.why or f"is a schedule: its next job is due at {_clock(row.next_at)}"


def pull_triggers(tx: Transaction) -> bool:
    """Let waiting jobs begin, end or be made whose time has come. Return whether one was changed."""
    changed = settle_dependencies(tx)
    changed = _submit_due(tx) or changed
    changed = _end_waiting(tx) or changed
    _tell_waiting(tx)
    return changed


def add_dependencies(tx: Transaction, row: JobRow, after: Iterable[JobRow]) -> None:
    """Let a job wait for others. It changes its reason, and the caller writes the row."""
    dependencies.add_dependencies(tx, row.pk, sorted({other.pk for other in after}))
    _explain_dependencies(tx, row)


def check_triggers(spec: JobSpec) -> None:
    """Check the fields of a spec that say what a job waits for.

    Raises:
        Refusal: One is illegal, or two contradict each other.
    """
    if not spec.cron:
        return
    if spec.after or spec.sweep is not None:
        raise Refusal(
            Reason.INVALID, "cron: a schedule waits for no job and has no sweep; leave them out", field="cron"
        )
    try:
        CronSchedule(spec.cron)
    except UsageError as error:
        raise Refusal(Reason.INVALID, str(error), field="cron") from None


def _explain_dependencies(tx: Transaction, row: JobRow) -> None:
    ids = dependencies.open_dependencies(tx, row.pk)
    if ids and not row.is_held:
        row.why = f"waits for {'job' if len(ids) == 1 else f'{len(ids)} jobs:'} {', '.join(ids[:5])}"


def settle_dependencies(tx: Transaction) -> bool:
    """Note which jobs that others wait for are over."""
    over = dependencies.settled(tx)
    for job, after, state in over:
        row = jobs.job_numbered(tx, job)
        if row is None or row.state != JobState.QUEUED:  # it was cancelled meanwhile
            dependencies.forget(tx, job)
            continue
        rule, is_well = row.decoded_spec().after_is, state == JobState.COMPLETED
        dependencies.forget(tx, job, None if rule == "any" and is_well else after)
        is_hopeless = not is_well and (
            rule == "success" or (rule == "any" and not dependencies.open_dependencies(tx, job))
        )
        if is_hopeless:
            dependencies.forget(tx, job)
            enter(tx, row, JobState.CANCELLED)
            row.why = f"after: job {dependencies.id_of(tx, after)} is {state}"
            notify_end(tx, row)
        else:
            row.why = ""
            _explain_dependencies(tx, row)
        jobs.update_job(tx, row)
    return bool(over)


def _submit_due(tx: Transaction) -> bool:
    """Make a job of each schedule that is due. Times that passed while no hub ran count once."""
    due = jobs.due_schedules(tx, tx.now, for_update=tx.for_update)
    for row in due:
        assert row.cron is not None
        if jobs.has_unfinished_child(tx, row.pk):
            note = f"the job of {_clock(row.next_at or 0)} was left out, because the one before is not over; "
        else:
            _submit_child(tx, row)
            note = ""
        row.next_at = CronSchedule(row.cron).after_ms(tx.now)
        row.why = f"is a schedule: {note}its next job is due at {_clock(row.next_at)}"
        jobs.update_job(tx, row)
    return bool(due)


def _submit_child(tx: Transaction, row: JobRow) -> None:
    spec = replace(row.decoded_spec(), cron="")
    child = JobRow(
        project=row.project,
        id=uuid.uuid4().hex,
        key=None,
        name=row.name,
        type=row.type,
        owner=row.owner,
        priority=row.priority,
        spec=jobs.encoded_spec(spec),
        created_at=tx.now,
        warm=row.warm,
        origin=row.pk,
    )
    prepare_waiting(tx, child, spec)
    jobs.add_job(tx, child)
    for name, (sha256, size) in jobs.blobs_of(tx, row.pk).items():
        jobs.set_blob(tx, child.pk, name, sha256, size)


def _end_waiting(tx: Transaction) -> bool:
    late = jobs.late_jobs(tx, tx.now, for_update=tx.for_update)
    for row in late:
        why = row.why
        enter(tx, row, JobState.TIMED_OUT)
        row.why = f"max_wait_s: it waited too long; {why}" if why else "max_wait_s: it waited too long"
        notify_end(tx, row)
        dependencies.forget(tx, row.pk)
        jobs.update_job(tx, row)
    return bool(late)


def _tell_waiting(tx: Transaction) -> None:
    for row in jobs.jobs_to_tell(tx, tx.now, for_update=tx.for_update):
        notify_waiting(tx, row)
        jobs.update_job(tx, row)


def _clock(moment_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment_ms / 1000))
