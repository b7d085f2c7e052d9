"""Jobs, their attempts and output, and the machines that they run on."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_ACTIVE = sa.text("ended_at IS NULL")


def _integer() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make the tables."""
    _make_jobs()
    _make_attempts()
    op.create_table(
        "machine_set",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("is_draining", sa.Boolean, nullable=False),
        sa.Column("full_until", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "device_use",
        sa.Column("project", _integer(), sa.ForeignKey("project.id"), primary_key=True, autoincrement=False),
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
    )


def _make_jobs() -> None:
    op.create_table(
        "job",
        sa.Column("pk", _integer(), primary_key=True, autoincrement=True),
        sa.Column("project", _integer(), sa.ForeignKey("project.id"), nullable=False),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("key", sa.Text),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("name", "type", "owner", "state")),
        sa.Column("is_held", sa.Boolean, nullable=False),
        sa.Column("priority", sa.SmallInteger, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("not_before", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("ended_at", sa.BigInteger),
        sa.Column("ends_as", sa.Text),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("has_turn", sa.Boolean, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("cost", sa.Double, nullable=False),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("user_failures", "start_failures", "losses")),
        sa.UniqueConstraint("project", "key"),
        sqlite_autoincrement=True,
    )
    op.create_index("job_by_project", "job", ["project", "pk"])
    op.create_index("job_unfinished", "job", ["state", "pk"], sqlite_where=_ACTIVE, postgresql_where=_ACTIVE)
    op.create_table(
        "job_blob",
        sa.Column("job", _integer(), sa.ForeignKey("job.pk"), primary_key=True, autoincrement=False),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
    )
    op.create_index("job_blob_by_hash", "job_blob", ["sha256"])


def _make_attempts() -> None:
    times = ("heard_at", "began_at", "saved_at", "ends_by", "free_at", "ended_at")
    op.create_table(
        "attempt",
        sa.Column("pk", _integer(), primary_key=True, autoincrement=True),
        sa.Column("job", _integer(), sa.ForeignKey("job.pk"), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("machines", "nodes", "waits_for")),
        sa.Column("on_loan", sa.Boolean, nullable=False),
        sa.Column("reserved_at", sa.BigInteger, nullable=False),
        sa.Column("launcher", sa.Text),
        sa.Column("claimed_at", sa.BigInteger),
        sa.Column("token", sa.Text),
        *(sa.Column(name, sa.BigInteger) for name in times),
        sa.Column("command", sa.Text, nullable=False),
        sa.Column("command_number", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("cost", sa.Double, nullable=False),
        sa.Column("output", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("job", "number"),
        sqlite_autoincrement=True,
    )
    op.create_index("attempt_active", "attempt", ["machines"], sqlite_where=_ACTIVE, postgresql_where=_ACTIVE)
    op.create_table(
        "job_output",
        sa.Column("attempt", _integer(), sa.ForeignKey("attempt.pk"), primary_key=True, autoincrement=False),
        sa.Column("start", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
