"""Use of devices by project and day, ends of jobs, and events of one thing."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_INTEGER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make the tables and the index. Earlier jobs are not counted."""
    op.create_table(
        "job_use",
        sa.Column("project", _INTEGER, sa.ForeignKey("project.id"), primary_key=True, autoincrement=False),
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("cost", sa.Double, nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "job_end",
        sa.Column("project", _INTEGER, sa.ForeignKey("project.id"), primary_key=True, autoincrement=False),
        sa.Column("type", sa.Text, primary_key=True),
        sa.Column("state", sa.Text, primary_key=True),
        sa.Column("bound", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("jobs", sa.BigInteger, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
    )
    op.create_index("event_by_resource", "event", ["resource", "id"], if_not_exists=True)  # new databases have it
