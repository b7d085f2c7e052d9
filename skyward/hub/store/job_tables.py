"""Tables of jobs, their attempts and output, and of the machines that they run on."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from .access_tables import metadata
from .tables import INTEGER, identity

__all__ = [
    "attempt",
    "delivery",
    "device_use",
    "job",
    "job_blob",
    "job_end",
    "job_items",
    "job_output",
    "job_quota",
    "job_spending",
    "job_use",
    "machine_set",
    "metadata",
]

_ACTIVE = text("ended_at IS NULL")
_KEPT = text("kept_until IS NOT NULL")
_OPEN = text("next_at IS NOT NULL")

job = Table(
    "job",
    metadata,
    identity("pk"),  # also its place in the queue
    Column("project", INTEGER, ForeignKey("project.id"), nullable=False),
    Column("id", Text, nullable=False, unique=True),
    Column("key", Text),  # of its client: the same one twice is one job
    Column("name", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("owner", Text, nullable=False),  # name of the user
    Column("state", Text, nullable=False),  # see model.jobs.JobState
    Column("is_held", Boolean, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("spec", Text, nullable=False),  # JSON, see model.jobs.JobSpec
    Column("created_at", BigInteger, nullable=False),
    Column("not_before", BigInteger, nullable=False),  # pause before the next attempt
    Column("started_at", BigInteger),
    Column("ended_at", BigInteger),
    Column("ends_as", Text),  # state in which it was told to end
    Column("why", Text, nullable=False),
    Column("has_turn", Boolean, nullable=False),  # it has a reservation, and keeps its turn
    Column("attempts", Integer, nullable=False),
    Column("cost", Double, nullable=False),
    Column("user_failures", Integer, nullable=False),
    Column("start_failures", Integer, nullable=False),
    Column("losses", Integer, nullable=False),
    Column("warm", Text),  # what a kept machine must have been used for; equal texts fit
    Column("wait_until", BigInteger),  # end of its patience, until it runs
    Column("cron", Text),  # of a schedule, which never runs itself
    Column("next_at", BigInteger),  # time of a schedule's next job
    Column("origin", BigInteger),  # pk of the schedule that made it
    Column("tell_at", BigInteger),  # time at which its owner is told that it still waits
    UniqueConstraint("project", "key"),
    Index("job_by_project", "project", "pk"),
    Index("job_unfinished", "state", "pk", sqlite_where=_ACTIVE, postgresql_where=_ACTIVE),
    sqlite_autoincrement=True,
)

job_after = Table(
    "job_after",
    metadata,
    Column("job", INTEGER, ForeignKey("job.pk"), primary_key=True, autoincrement=False),
    Column("after", INTEGER, ForeignKey("job.pk"), primary_key=True, autoincrement=False),
    Index("job_after_by_other", "after"),
)

job_blob = Table(
    "job_blob",
    metadata,
    Column("job", INTEGER, ForeignKey("job.pk"), primary_key=True, autoincrement=False),
    Column("name", Text, primary_key=True),  # see model.jobs.BLOBS
    Column("sha256", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Index("job_blob_by_hash", "sha256"),
)

attempt = Table(
    "attempt",
    metadata,
    identity("pk"),
    Column("job", INTEGER, ForeignKey("job.pk"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("machines", Text, nullable=False),  # name of a machine set, which may be gone
    Column("nodes", Text, nullable=False),  # JSON
    Column("waits_for", Text, nullable=False),  # JSON: numbers (pk) of attempts that must end first
    Column("on_loan", Boolean, nullable=False),
    Column("reserved_at", BigInteger, nullable=False),
    Column("launcher", Text),  # name of the launcher that took it
    Column("claimed_at", BigInteger),
    Column("token", Text),  # id of the runner's token
    Column("heard_at", BigInteger),  # last message of its runner
    Column("began_at", BigInteger),
    Column("saved_at", BigInteger),
    Column("ends_by", BigInteger),  # end of its grace
    Column("free_at", BigInteger),  # of a lost one: end of its machines' lease
    Column("ended_at", BigInteger),
    Column("command", Text, nullable=False),
    Column("command_number", Integer, nullable=False),
    Column("outcome", Text, nullable=False),  # see model.jobs.AttemptEnd; `end` is a word of SQL
    Column("error", Text, nullable=False),
    Column("cost", Double, nullable=False),
    Column("output", BigInteger, nullable=False),  # bytes of output
    Column("runner", BigInteger),  # pk of the attempt whose runner serves it; its own if null
    Column("kept_until", BigInteger),  # end of the time for which its machines wait for the next attempt
    Column("idle_cost", Double),  # cost of that time so far
    Column("saves", Integer),  # number of the last save that its training noted
    Column("late_at", BigInteger),  # time at which its newest checkpoint was found to be too old
    Column("items", BigInteger),  # bytes of the items of its generator
    UniqueConstraint("job", "number"),
    Index("attempt_active", "machines", sqlite_where=_ACTIVE, postgresql_where=_ACTIVE),
    Index("attempt_kept", "machines", sqlite_where=_KEPT, postgresql_where=_KEPT),
    sqlite_autoincrement=True,
)

delivery = Table(
    "delivery",
    metadata,
    identity("pk"),
    Column("job", INTEGER, ForeignKey("job.pk"), nullable=False),
    Column("id", Text, nullable=False, unique=True),  # of the message, the same for each try
    Column("kind", Text, nullable=False),  # see model.notices.NoticeKind
    Column("target", Text, nullable=False),  # JSON, see model.notices.NoticeTarget
    Column("body", Text, nullable=False),  # JSON, as it is sent
    Column("created_at", BigInteger, nullable=False),
    Column("next_at", BigInteger),  # of the next try; null once it has arrived, or is given up
    Column("tries", Integer, nullable=False),
    Column("delivered_at", BigInteger),
    Column("error", Text, nullable=False),  # of the last try
    Index("delivery_by_job", "job", "pk"),
    Index("delivery_due", "next_at", sqlite_where=_OPEN, postgresql_where=_OPEN),
    sqlite_autoincrement=True,
)

job_output = Table(
    "job_output",
    metadata,
    Column("attempt", INTEGER, ForeignKey("attempt.pk"), primary_key=True, autoincrement=False),
    Column("start", BigInteger, primary_key=True, autoincrement=False),  # offset of its first byte
    Column("body", LargeBinary, nullable=False),
)

job_items = Table(
    "job_items",
    metadata,
    Column("attempt", INTEGER, ForeignKey("attempt.pk"), primary_key=True, autoincrement=False),
    Column("start", BigInteger, primary_key=True, autoincrement=False),  # offset of its first byte
    Column("body", LargeBinary, nullable=False),
)

machine_set = Table(
    "machine_set",
    metadata,
    Column("name", Text, primary_key=True),
    Column("body", Text, nullable=False),  # JSON, see model.capacity.MachineSetSpec
    Column("is_draining", Boolean, nullable=False),
    Column("full_until", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("older_until", BigInteger),  # a launcher too old for some jobs was seen, see services.jobs.protocol
)

device_use = Table(
    "device_use",
    metadata,
    Column("project", INTEGER, ForeignKey("project.id"), primary_key=True, autoincrement=False),
    Column("kind", Text, primary_key=True),  # kind of device
    Column("seconds", Double, nullable=False),  # device-seconds, decayed to `at`
    Column("at", BigInteger, nullable=False),
)

job_quota = Table(
    "job_quota",
    metadata,
    Column("holder", Text, primary_key=True),  # "project" or "user"
    Column("name", Text, primary_key=True),  # of the project or the user
    Column("body", Text, nullable=False),  # JSON, see model.quotas.JobQuotaSpec
)

job_spending = Table(
    "job_spending",
    metadata,
    Column("project", INTEGER, ForeignKey("project.id"), primary_key=True, autoincrement=False),
    Column("owner", Text, primary_key=True),  # name of the user
    Column("day", BigInteger, primary_key=True, autoincrement=False),  # days since 1970, in UTC
    Column("usd", Double, nullable=False),
)

# Both stay when a job is deleted: its cost was paid, and counters never fall.
job_use = Table(
    "job_use",
    metadata,
    Column("project", INTEGER, ForeignKey("project.id"), primary_key=True, autoincrement=False),
    Column("day", Integer, primary_key=True, autoincrement=False),  # since 1970, in UTC
    Column("kind", Text, primary_key=True),  # kind of device
    Column("seconds", Double, nullable=False),  # device-seconds
    Column("cost", Double, nullable=False),
    Column("attempts", BigInteger, nullable=False),  # that ended on this day
)

job_end = Table(
    "job_end",
    metadata,
    Column("project", INTEGER, ForeignKey("project.id"), primary_key=True, autoincrement=False),
    Column("type", Text, primary_key=True),
    Column("state", Text, primary_key=True),
    Column("bound", Integer, primary_key=True, autoincrement=False),  # of their durations, see model.usage.BOUNDS_S
    Column("jobs", BigInteger, nullable=False),
    Column("seconds", Double, nullable=False),  # of all of them together
)
