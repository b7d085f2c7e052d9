"""Tables of sweeps and their trials."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Index, Table, Text, UniqueConstraint

from .job_tables import metadata
from .tables import INTEGER, identity

__all__ = ["metadata", "sweep", "trial", "trial_step"]

sweep = Table(
    "sweep",
    metadata,
    identity(),
    Column("project", INTEGER, ForeignKey("project.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("key", Text, nullable=False),  # of the request that made it, so that it may come again
    Column("owner", Text, nullable=False),
    Column("directions", Text, nullable=False),  # JSON
    Column("created_at", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),  # counts changes of its trials
    Column("trials", BigInteger, nullable=False),
    Column("user_attrs", Text, nullable=False),  # JSON
    Column("system_attrs", Text, nullable=False),  # JSON
    UniqueConstraint("project", "name"),
    sqlite_autoincrement=True,
)

trial = Table(
    "trial",
    metadata,
    identity(),
    Column("sweep", INTEGER, ForeignKey("sweep.id"), nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("key", Text, nullable=False),  # of the request that made it
    Column("state", Text, nullable=False),
    Column("state_key", Text, nullable=False),  # of the request that changed its state last
    Column("objective", Text),  # JSON; `values` is a word of SQL
    Column("params", Text, nullable=False),  # JSON
    Column("user_attrs", Text, nullable=False),  # JSON
    Column("system_attrs", Text, nullable=False),  # JSON
    Column("started_us", BigInteger),
    Column("ended_us", BigInteger),
    Column("heartbeat_at", BigInteger),
    Column("changed", BigInteger, nullable=False),  # version of its sweep
    UniqueConstraint("sweep", "number"),
    UniqueConstraint("sweep", "key"),
    Index("trial_by_change", "sweep", "changed"),
    sqlite_autoincrement=True,
)

# A row for each value that a trial reports: as a part of the trial's row, a report would write all earlier ones again.
trial_step = Table(
    "trial_step",
    metadata,
    Column("trial", INTEGER, ForeignKey("trial.id"), primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("sweep", INTEGER, nullable=False),
    Column("changed", BigInteger, nullable=False),  # version of its sweep
    Column("value", Double),  # NULL: not a number, which SQLite cannot hold
    Index("trial_step_by_change", "sweep", "changed"),
    sqlite_with_rowid=False,
)
