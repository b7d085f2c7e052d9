"""First tables.

Until the first release, this revision means the tables as the program declares them. Later revisions write each step
out, because the declarations go on to change.
"""

from __future__ import annotations

from alembic import op

from skyward.hub.store.registry_tables import metadata

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    metadata.create_all(op.get_bind(), checkfirst=False)
