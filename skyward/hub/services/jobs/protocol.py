"""Versions of the messages between the hub and its launchers and runners, and the jobs that need a newer one."""

from __future__ import annotations

from ...model.jobs import PROTOCOL, PROTOCOLS, JobSpec, JobState
from ...model.refusal import Reason, Refusal
from ...store import jobs, machine_sets
from ...store.attempts import AttemptRow
from ...store.jobs import JobRow
from ...store.transaction import Transaction
from .life import release_attempt

PAUSE_S = 60.0
"""Seconds for which machines whose launcher is too old for a job are left to other jobs."""
OLDER_S = 600.0
"""Seconds for which other machines are preferred for a job to those whose launcher was too old for one."""
_NEWEST = 3
_TOO_OLD = "waits for a newer launcher"


def check_protocol(spoken: int) -> None:
    """Refuse a launcher or runner whose messages this hub does not understand."""
    if spoken in PROTOCOLS:
        return
    who = "the hub's skyward" if spoken > PROTOCOL else "skyward where the launcher runs, and start it again"
    known = " and ".join(map(str, PROTOCOLS))
    raise Refusal(
        Reason.INVALID, f"protocol={spoken}: this hub speaks versions {known}; upgrade {who}", field="protocol"
    )


def understands(spoken: int, spec: JobSpec) -> bool:
    """Return whether a launcher of this version can run a job: an older one would drop fields that it does not know."""
    return spoken >= _NEWEST or not needs_newest(spec)


def needs_newest(spec: JobSpec) -> bool:
    """Return whether launchers of the version before cannot run a job."""
    return spec.is_stream or spec.trials is not None or spec.trial is not None


def needs_newer(job: JobRow) -> bool:
    """Return whether a placed job was last seen by a launcher that is too old for it."""
    return job.state == JobState.RESERVED and job.why.startswith(_TOO_OLD)


def explain_older(tx: Transaction, launcher: str, job: JobRow, attempt: AttemptRow) -> None:
    """Write why a job waits whose launcher is too old for it. Such jobs are placed on other machines for a while."""
    spec = job.decoded_spec()
    what = "a trial" if spec.trial is not None else "a sweep"
    what = "a stream" if spec.is_stream else f"{what} whose trials are jobs"
    job.why = (
        f"{_TOO_OLD}: {launcher} of machines {attempt.machines!r} is too old for {what};"
        f" upgrade skyward there and start it again, or run `skyward capacity drain {attempt.machines}`"
    )
    jobs.set_reasons(tx, [(job.why, job.has_turn, job.pk)])
    machine_sets.set_older(tx, attempt.machines, tx.now + int(OLDER_S * 1000))


def note_newest(tx: Transaction, spoken: int, machines: str) -> None:
    """Note that a launcher has taken a job. One of the newest version shows that its machines suit each job."""
    if spoken >= _NEWEST:
        machine_sets.set_older(tx, machines, 0)


def release_from_older(tx: Transaction, job: JobRow, attempt: AttemptRow, *, has_others: bool) -> None:
    """Take machines back whose launchers are all too old for the job.

    Args:
        tx: The transaction.
        job: The job.
        attempt: Its attempt, which no launcher has taken.
        has_others: Whether other machines suit it. Otherwise it waits for a while, in which other jobs have these.
    """
    why = job.why
    if attempt.node_numbers and not has_others:
        job.not_before = tx.now + int(PAUSE_S * 1000)
    release_attempt(tx, job, attempt)
    jobs.set_reasons(tx, [(why, job.has_turn, job.pk)])
