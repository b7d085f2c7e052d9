"""Tables of people and their rights, of projects' limits, of the audit, of events, and of who leads.

Those of the registry are in `registry_tables.py`.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Index, SmallInteger, Table, Text, UniqueConstraint, text

from .tables import INTEGER, identity, metadata

__all__ = ["account", "audit", "event", "lease", "membership", "metadata", "quota", "token"]

account = Table(
    "account",  # `user` is a word of PostgreSQL's
    metadata,
    identity(),
    Column("organization", INTEGER, ForeignKey("organization.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("kind", Text, nullable=False),  # "person" or "service"
    Column("is_owner", Boolean, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("disabled_at", BigInteger),
    UniqueConstraint("organization", "name"),
    sqlite_autoincrement=True,
)

membership = Table(
    "membership",
    metadata,
    Column("project", INTEGER, ForeignKey("project.id"), primary_key=True, autoincrement=False),
    Column("account", INTEGER, ForeignKey("account.id"), primary_key=True, autoincrement=False),
    Column("role", SmallInteger, nullable=False),  # see model.access.Role
    Column("created_at", BigInteger, nullable=False),
    Index("membership_by_account", "account", "project"),
)

quota = Table(
    "quota",
    metadata,
    Column("project", INTEGER, ForeignKey("project.id"), primary_key=True, autoincrement=False),
    Column("name", Text, primary_key=True),  # see model.quotas.Quota
    Column("most", BigInteger, nullable=False),
    Column(
        "used", BigInteger, nullable=False
    ),  # counted on, because counting 100,000 runs takes longer than adding one
)

token = Table(
    "token",
    metadata,
    Column("id", Text, primary_key=True),  # the part of the token that is no secret
    # Of the secret. It has 256 random bits, so that a slow hash would add nothing.
    Column("sha256", Text, nullable=False),
    Column("kind", Text, nullable=False),  # "token", "run", "session" or "code"
    Column("account", INTEGER, ForeignKey("account.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("project", INTEGER, ForeignKey("project.id")),  # NULL: every project of the account
    Column("role", SmallInteger),  # greatest role that the token gives; NULL: that of the account
    Column("run", Text),  # id of the only run that a run's token may touch
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("used_at", BigInteger),
    Index("token_by_account", "account", "created_at"),
    Index(
        "token_by_expiry",
        "expires_at",
        sqlite_where=text("expires_at IS NOT NULL"),
        postgresql_where=text("expires_at IS NOT NULL"),
    ),
)

audit = Table(
    "audit",
    metadata,
    identity(),
    Column("organization", INTEGER, nullable=False),
    Column("project", INTEGER, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("actor", Text, nullable=False),
    Column("token", Text),
    Column("action", Text, nullable=False),
    Column("resource", Text, nullable=False),
    Column("detail", Text, nullable=False),  # JSON
    Column("hash", Text, nullable=False),  # SHA-256 of this row and of the hash before
    Index("audit_by_project", "project", "id"),
    sqlite_autoincrement=True,
)

event = Table(
    "event",
    metadata,
    identity(),
    Column("organization", INTEGER, nullable=False),
    Column("project", INTEGER, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("resource", Text, nullable=False),
    Column("body", Text, nullable=False),  # JSON
    Index("event_by_project", "project", "id"),
    Index("event_by_resource", "resource", "id"),  # the history of a job
    sqlite_autoincrement=True,
)

lease = Table(
    "lease",
    metadata,
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),  # a server process; empty: nobody
    Column("fence", BigInteger, nullable=False),  # grows with each change of the holder
    Column("expires_at", BigInteger, nullable=False),  # by the clock of the database
)
