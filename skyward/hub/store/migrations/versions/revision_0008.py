"""Jobs that wait for others, for a time, or no longer than a time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_INTEGER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make the table and the columns."""
    op.create_table(
        "job_after",
        sa.Column("job", _INTEGER, sa.ForeignKey("job.pk"), primary_key=True, autoincrement=False),
        sa.Column("after", _INTEGER, sa.ForeignKey("job.pk"), primary_key=True, autoincrement=False),
    )
    op.create_index("job_after_by_other", "job_after", ["after"])
    op.add_column("job", sa.Column("wait_until", sa.BigInteger))
    op.add_column("job", sa.Column("cron", sa.Text))
    op.add_column("job", sa.Column("next_at", sa.BigInteger))
    op.add_column("job", sa.Column("origin", sa.BigInteger))
