"""Quotas of jobs, and what jobs have cost on each day."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "job_quota",
        sa.Column("holder", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_table(
        "job_spending",
        sa.Column(
            "project",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            sa.ForeignKey("project.id"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("day", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("usd", sa.Double, nullable=False),
    )
