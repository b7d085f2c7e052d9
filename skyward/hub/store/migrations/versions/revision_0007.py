"""Machines that stay between jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_KEPT = sa.text("kept_until IS NOT NULL")


def upgrade() -> None:
    """Add the columns."""
    op.add_column("job", sa.Column("warm", sa.Text))
    op.add_column("attempt", sa.Column("runner", sa.BigInteger))
    op.add_column("attempt", sa.Column("kept_until", sa.BigInteger))
    op.add_column("attempt", sa.Column("idle_cost", sa.Double))
    op.create_index("attempt_kept", "attempt", ["machines"], sqlite_where=_KEPT, postgresql_where=_KEPT)
