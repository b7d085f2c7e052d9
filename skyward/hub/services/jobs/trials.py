"""Jobs that are trials of a sweep. The sweep's driver is a job too, and its token is for these jobs only."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from ...model.access import Actor, Right
from ...model.jobs import JobRecord, JobSpec, JobState
from ...model.refusal import Reason, Refusal
from ...store import jobs
from ...store.jobs import JobRow, trial_key
from ...store.transaction import ReadSnapshot, Transaction
from ..bell import Bell
from ..calls import Service
from .attempts import need_attempt
from .job_records import record_of
from .jobs import begin_again
from .kept import warm_of
from .triggers import prepare_waiting


class TrialJobs(Service):
    """Calls of the drivers of sweeps whose trials are jobs."""

    def __init__(self, *arguments: Any, bell: Bell, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bell = bell

    async def start(self, actor: Actor, job_id: str, attempt: int, number: int, task: Mapping[str, Any]) -> JobRecord:
        """Submit the job of a trial, or find the one that an earlier attempt of the driver submitted.

        One that was cancelled begins again: its sweep was ended before, and goes on now.

        Args:
            actor: The driver's runner.
            job_id: The driver's job.
            attempt: Number of its attempt.
            number: Number of the trial in its sweep.
            task: The trial's task, as `client.trial.TrialTask` has it.

        Raises:
            Refusal: The attempt is over, its job is being ended, or it drives no such sweep.
        """
        actor.require(Right.WRITE)
        return await self.database.write(self._start, actor, job_id, attempt, number, task)

    async def unfinished(self, actor: Actor, job_id: str, attempt: int) -> list[str]:
        """Return the ids of the jobs of a driver's trials that are not over.

        Raises:
            Refusal: The attempt is over, or its job drives no such sweep.
        """
        actor.require(Right.READ)
        return await self.database.read(_unfinished, actor, job_id, attempt)

    def _start(
        self, tx: Transaction, actor: Actor, job_id: str, attempt: int, number: int, task: Mapping[str, Any]
    ) -> JobRecord:
        driver, _ = need_attempt(tx, actor, job_id, attempt, for_update=tx.for_update)
        sweep = _sweep_of(driver)
        if driver.ends_as is not None:
            raise Refusal(Reason.CONFLICT, f"job={job_id[:40]}: is being ended; begin no trial", field="job")
        row = jobs.find_job_by_key(tx, driver.project, trial_key(sweep, number))
        blobs = {name: blob for name, blob in jobs.blobs_of(tx, driver.pk).items() if name in ("code", "call")}
        if row is None:
            row = _new_row(tx, driver, sweep, number, task, blobs.get("code", ("", 0))[0])
            self.on_change(tx, actor, "job.create", f"job/{row.id}", {"name": row.name, "trial": number})
        elif JobState.CANCELLED not in (row.state, row.ends_as):
            return record_of(row)
        for name, (sha256, size) in blobs.items():
            jobs.set_blob(tx, row.pk, name, sha256, size)
        if row.state == JobState.CANCELLED:
            begin_again(tx, row)
        elif row.ends_as is not None:  # its machines end, and then it waits like any other
            row.ends_as = None
            jobs.update_job(tx, row)
        tx.after_commit(self._bell.ring)
        return record_of(row)


def _unfinished(snapshot: ReadSnapshot, actor: Actor, job_id: str, attempt: int) -> list[str]:
    driver, _ = need_attempt(snapshot, actor, job_id, attempt)
    return [row.id for row in jobs.unfinished_trials(snapshot, _sweep_of(driver))]


def _sweep_of(driver: JobRow) -> int:
    spec = driver.decoded_spec()
    if spec.trials is None or spec.sweep is None:
        problem = "drives no sweep whose trials are jobs; submit one with trials='jobs'"
        raise Refusal(Reason.CONFLICT, f"job={driver.id}: {problem}", field="job")
    return spec.sweep


def _new_row(tx: Transaction, driver: JobRow, sweep: int, number: int, task: Mapping[str, Any], code: str) -> JobRow:
    trials = driver.decoded_spec().trials
    spec = JobSpec(**{**(trials or {}), "trial": {"sweep": sweep, "number": number, "task": dict(task)}})
    row = JobRow(
        project=driver.project,
        id=uuid.uuid4().hex,
        key=trial_key(sweep, number),
        name=f"{driver.name[:90]}-{number}",
        type=driver.type,
        owner=driver.owner,
        priority=driver.priority,
        spec=jobs.encoded_spec(spec),
        created_at=tx.now,
    )
    row.warm = warm_of(driver.project, driver.owner, spec, code)
    prepare_waiting(tx, row, spec)
    jobs.add_job(tx, row)
    return row
