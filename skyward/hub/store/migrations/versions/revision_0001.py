"""First tables.

Until the first release, this revision means the tables as the program declares them, without those that later
revisions add. Later revisions write each step out, because the declarations go on to change.
"""

from __future__ import annotations

from alembic import op

from skyward.hub.store.registry_tables import metadata

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ADDED_LATER = frozenset(
    {"attempt", "device_use", "job", "job_after", "job_blob", "job_output", "lease", "machine_set", "quota"}
    | {"sweep", "trial", "trial_step"}
    | {"job_quota", "job_spending", "job_use", "job_end", "delivery", "job_items"}
)


def upgrade() -> None:
    """Make the tables."""
    first = [table for table in metadata.sorted_tables if table.name not in ADDED_LATER]
    metadata.create_all(op.get_bind(), tables=first, checkfirst=False)
