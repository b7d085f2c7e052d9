"""Sweeps and their trials."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_INTEGER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "sweep",
        sa.Column("id", _INTEGER, primary_key=True, autoincrement=True),
        sa.Column("project", _INTEGER, sa.ForeignKey("project.id"), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("directions", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("trials", sa.BigInteger, nullable=False),
        sa.Column("user_attrs", sa.Text, nullable=False),
        sa.Column("system_attrs", sa.Text, nullable=False),
        sa.UniqueConstraint("project", "name"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "trial",
        sa.Column("id", _INTEGER, primary_key=True, autoincrement=True),
        sa.Column("sweep", _INTEGER, sa.ForeignKey("sweep.id"), nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("state_key", sa.Text, nullable=False),
        sa.Column("objective", sa.Text),
        sa.Column("params", sa.Text, nullable=False),
        sa.Column("user_attrs", sa.Text, nullable=False),
        sa.Column("system_attrs", sa.Text, nullable=False),
        sa.Column("started_us", sa.BigInteger),
        sa.Column("ended_us", sa.BigInteger),
        sa.Column("heartbeat_at", sa.BigInteger),
        sa.Column("changed", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("sweep", "number"),
        sa.UniqueConstraint("sweep", "key"),
        sqlite_autoincrement=True,
    )
    op.create_index("trial_by_change", "trial", ["sweep", "changed"])
    op.create_table(
        "trial_step",
        sa.Column("trial", _INTEGER, sa.ForeignKey("trial.id"), primary_key=True, autoincrement=False),
        sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("sweep", _INTEGER, nullable=False),
        sa.Column("changed", sa.BigInteger, nullable=False),
        sa.Column("value", sa.Double),
        sqlite_with_rowid=False,
    )
    op.create_index("trial_step_by_change", "trial_step", ["sweep", "changed"])
