"""Load of the GPUs of running jobs, as sampled events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...model.access import Actor, Role
from ...store import journal
from ...store.attempts import AttemptRow
from ...store.jobs import JobRow
from ...store.schema import ORGANIZATION
from ...store.transaction import Transaction
from .. import outbox

SAMPLE_MS = 15_000
"""Milliseconds between two events of a job, at least. A runner sends a sample each 30 s; more are dropped."""
KEPT = 20
"""Newest events of a job that are kept. A run keeps the load for good: see `HubLogger`."""


def note_gpus(tx: Transaction, job: JobRow, attempt: AttemptRow, samples: Sequence[Mapping[str, Any]]) -> None:
    """Announce a sample of the load of a job's GPUs, unless the last one is too young."""
    if not samples:
        return
    resource = f"gpu/{job.id}"
    before = journal.events_of(tx, job.project, resource, KEPT)
    if before and 0 <= tx.now - before[-1].at < SAMPLE_MS:
        return
    if len(before) == KEPT:
        journal.drop_events(tx, job.project, resource, before[0].id)
    actor = Actor(user="hub", organization=ORGANIZATION, project=job.project, role=Role.OWNER)
    facts = {"job": job.id, "name": job.name, "attempt": attempt.number, "machines": attempt.machines}
    outbox.record(tx, actor, "gpu.sampled", resource, {**facts, "gpus": list(samples)})
