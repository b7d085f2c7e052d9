"""Items of jobs whose functions are generators."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_INTEGER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make the table and the column."""
    op.create_table(
        "job_items",
        sa.Column("attempt", _INTEGER, sa.ForeignKey("attempt.pk"), primary_key=True, autoincrement=False),
        sa.Column("start", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.add_column("attempt", sa.Column("items", sa.BigInteger))
