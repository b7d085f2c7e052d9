"""Launches: everything that a runner needs to begin an attempt, with a token of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...model.access import Actor, Role
from ...model.capacity import MachineSetSpec
from ...model.jobs import AttemptEnd, JobSpec, JobState
from ...model.tokens import new_token
from ...store import attempts, identities, jobs
from ...store.attempts import AttemptRow
from ...store.jobs import JobRow
from ...store.transaction import Transaction
from .kept import kept_s
from .life import enter, finish_attempt, machines_named


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


def claim(
    tx: Transaction, actor: Actor, launcher: str | None, job: JobRow, attempt: AttemptRow, grace_s: float
) -> Launch | None:
    """Give an attempt to a launcher, with a token that acts as the job's user until the attempt is over.

    Returns:
        The launch. None: its machines are gone, and the attempt is over.
    """
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
        grace_s=grace_s,
        keep_s=kept_s(job.decoded_spec(), machines) if job.warm else 0.0,
        code=jobs.blobs_of(tx, job.pk).get("code", ("", 0))[0],
    )


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
