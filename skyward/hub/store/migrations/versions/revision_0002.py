"""Limits of projects, and the lease of the server that leads."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "quota",
        sa.Column(
            "project",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            sa.ForeignKey("project.id"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("most", sa.BigInteger, nullable=False),
        sa.Column("used", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "lease",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("fence", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
    )
    op.execute("INSERT INTO lease (name, holder, fence, expires_at) VALUES ('periodic', '', 0, 0)")
