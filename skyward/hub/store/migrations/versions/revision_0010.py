"""Sets of machines whose launchers are too old for some jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the column."""
    op.add_column("machine_set", sa.Column("older_until", sa.BigInteger))
