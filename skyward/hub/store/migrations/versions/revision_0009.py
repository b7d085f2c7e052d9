"""News of jobs for their owners, and checkpoints that are late."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_INTEGER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_OPEN = sa.text("next_at IS NOT NULL")


def upgrade() -> None:
    """Make the table and the columns."""
    op.create_table(
        "delivery",
        sa.Column("pk", _INTEGER, primary_key=True, autoincrement=True),
        sa.Column("job", _INTEGER, sa.ForeignKey("job.pk"), nullable=False),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("next_at", sa.BigInteger),
        sa.Column("tries", sa.Integer, nullable=False),
        sa.Column("delivered_at", sa.BigInteger),
        sa.Column("error", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("delivery_by_job", "delivery", ["job", "pk"])
    op.create_index("delivery_due", "delivery", ["next_at"], sqlite_where=_OPEN, postgresql_where=_OPEN)
    op.add_column("job", sa.Column("tell_at", sa.BigInteger))
    op.add_column("attempt", sa.Column("saves", sa.Integer))
    op.add_column("attempt", sa.Column("late_at", sa.BigInteger))
