"""The history of a job: what happened to it and when, what it used, and what it may still cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...model.access import Actor, Right
from ...model.notices import parse_targets
from ...store import attempts, deliveries, jobs, journal
from ...store.attempts import AttemptRow
from ...store.database import Database
from ...store.deliveries import DeliveryRow
from ...store.transaction import ReadSnapshot
from ..calls import require_no_run_token
from .job_records import need_job
from .life import machines_named, shape_of

MOST_EVENTS = 1_000
MOST_DELIVERIES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """Something that happened to a job, such as "running" or "saved", in an attempt (0: before the first).

    `save` has path, step, bytes and seconds of a save, where the training has noted them.
    """

    at: int
    kind: str
    attempt: int
    save: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """Facts of an attempt beside its record.

    Attributes:
        devices: Numbers of its devices on each node; empty if they have none.
        saved_at: Time of its last checkpoint; None if there is none.
        late_at: Time at which that was found to be too old; None if it is not.
        ends_by: Time by which it ends, if it is not over.
        usd_per_hour: Price of its machines; 0 if they cost nothing, or their set is gone.
    """

    number: int
    devices: Sequence[int]
    saved_at: int | None
    late_at: int | None
    ends_by: int | None
    usd_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDelivery:
    """News that the owner of a job gets.

    Attributes:
        id: Id of the message.
        kind: See `model.notices.NoticeKind`.
        target: Host or program.
        at: Time of the news.
        tries: Number of tries.
        next_at: Time of the next try; None if it has arrived or is given up.
        delivered_at: Time at which it arrived.
        error: Error of the last try.
    """

    id: str
    kind: str
    target: str
    at: int
    tries: int
    next_at: int | None
    delivered_at: int | None
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHistory:
    """Facts that a job's page shows beside the job.

    Attributes:
        needs: Machines that it needs, in words.
        result_sizes: Name of a result -> bytes.
        deliveries: News for its owner, the newest first.
    """

    needs: str
    events: Sequence[JobEvent]
    attempts: Sequence[AttemptFacts]
    result_sizes: Mapping[str, int]
    deliveries: Sequence[JobDelivery] = ()


class Histories:
    """Reads histories of jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def history(self, actor: Actor, job_id: str) -> JobHistory:
        """Return the history of a job, with its newest events."""
        actor.require(Right.READ)
        require_no_run_token(actor)
        return await self._database.read(_history, actor, job_id)


def _history(snapshot: ReadSnapshot, actor: Actor, job_id: str) -> JobHistory:
    row = need_job(snapshot, actor, job_id)
    spec = row.decoded_spec()
    events = []
    for event in journal.events_of(snapshot, actor.project, f"job/{row.id}", MOST_EVENTS):
        body: Any = journal.decoded(event.body)
        save = {name: body[name] for name in ("path", "step", "bytes", "seconds")} if "path" in body else None
        kind, attempt = event.kind.removeprefix("job."), int(body.get("attempt", 0))
        events.append(JobEvent(at=event.at, kind=kind, attempt=attempt, save=save))
    return JobHistory(
        needs=shape_of(spec).in_words(),
        events=events,
        attempts=[_facts(snapshot, attempt, spec.max_duration_s) for attempt in attempts.attempts_of(snapshot, row.pk)],
        result_sizes={
            name: size for name, (_, size) in jobs.blobs_of(snapshot, row.pk).items() if name in ("value", "error")
        },
        deliveries=[_delivery(found) for found in deliveries.deliveries_of(snapshot, row.pk, MOST_DELIVERIES)],
    )


def _delivery(row: DeliveryRow) -> JobDelivery:
    (target,) = parse_targets([json.loads(row.target)])
    return JobDelivery(
        id=row.id,
        kind=row.kind,
        target=target.name,
        at=row.created_at,
        tries=row.tries,
        next_at=row.next_at,
        delivered_at=row.delivered_at,
        error=row.error,
    )


def _facts(snapshot: ReadSnapshot, attempt: AttemptRow, max_duration_s: float) -> AttemptFacts:
    machines = machines_named(snapshot, attempt.machines)
    begins_at = attempt.began_at or attempt.reserved_at
    ends_by = attempt.free_at or attempt.ends_by or begins_at + int(max_duration_s * 1000)
    return AttemptFacts(
        number=attempt.number,
        devices=attempt.device_numbers,
        saved_at=attempt.saved_at,
        late_at=attempt.late_at,
        ends_by=None if attempt.ended_at is not None else ends_by,
        usd_per_hour=0.0 if machines is None else machines.usd_per_hour * len(attempt.node_numbers),
    )
