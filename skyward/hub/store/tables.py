"""Tables of runs and their points. Each column has a reader, and each query of a hot path an index.

Two integers name a run (`run.pk`) and a name inside a project (`key.id`) in every table that grows with points, because
text there would be most of the bytes. Times are milliseconds since 1970. Tables that belong to people are in
`access_tables.py`; those of the registry in `registry_tables.py`.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)

metadata = MetaData()

INTEGER = BigInteger().with_variant(Integer, "sqlite")
"""A 64-bit integer. SQLite numbers rows by itself only where the type is called INTEGER."""

BYTEWISE = Text().with_variant(Text(collation="C"), "postgresql")
"""Text that is ordered by its bytes, whatever language PostgreSQL was set up for: folders are ranges of names."""

INDEXED_LENGTH = 200
"""Characters of a value that its index holds. PostgreSQL refuses index rows above 2,700 bytes."""


def identity(name: str = "id") -> Column[int]:
    """Primary key that the database numbers. A number is never used twice, see `sqlite_autoincrement`."""
    return Column(name, INTEGER, primary_key=True, autoincrement=True)


organization = Table(
    "organization",
    metadata,
    identity(),
    Column("name", Text, nullable=False, unique=True),
    Column("created_at", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)

project = Table(
    "project",
    metadata,
    identity(),
    Column("organization", INTEGER, ForeignKey("organization.id"), nullable=False),
    Column("name", Text, nullable=False),  # a deleted one's has its id added, so that the name is free again
    Column("description", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("deleted_at", BigInteger),
    UniqueConstraint("organization", "name"),
    sqlite_autoincrement=True,
)

experiment = Table(
    "experiment",
    metadata,
    identity(),
    Column("project", INTEGER, ForeignKey("project.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("owner", Text, nullable=False),  # name of the user who made it
    Column("artifact_location", Text),  # empty: ours, made from the id
    Column("lifecycle", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("deleted_at", BigInteger),
    Column("tags", Text, nullable=False),  # JSON, for pages of experiments
    UniqueConstraint("project", "name"),
    Index("experiment_by_update", "project", "lifecycle", "updated_at", "id"),
    sqlite_autoincrement=True,
)

experiment_tag = Table(
    "experiment_tag",
    metadata,
    Column("experiment", INTEGER, ForeignKey("experiment.id"), primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
    sqlite_with_rowid=False,
)

run = Table(
    "run",
    metadata,
    identity("pk"),
    Column("project", INTEGER, ForeignKey("project.id"), nullable=False),
    Column("id", Text, nullable=False),
    Column("experiment", INTEGER, ForeignKey("experiment.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("lifecycle", Text, nullable=False),
    Column("owner", Text, nullable=False),  # name of the user; `user` is a word of PostgreSQL's
    Column("started_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
    Column("heartbeat_at", BigInteger),
    Column("deleted_at", BigInteger),
    Column("error", Text),
    # JSON for pages of runs: one read instead of a row for each parameter. `attribute` holds the same for searches.
    Column("params", Text, nullable=False),
    Column("tags", Text, nullable=False),
    UniqueConstraint("project", "id"),
    Index("run_by_start", "experiment", "lifecycle", text("started_at DESC"), "id"),
    Index("run_of_project_by_start", "project", "lifecycle", text("started_at DESC"), "id"),
    Index(
        "run_by_heartbeat",
        "heartbeat_at",
        sqlite_where=text("state = 'running' AND heartbeat_at IS NOT NULL"),
        postgresql_where=text("state = 'running' AND heartbeat_at IS NOT NULL"),
    ),
    Index(
        "run_by_deletion",
        "deleted_at",
        sqlite_where=text("deleted_at IS NOT NULL"),
        postgresql_where=text("deleted_at IS NOT NULL"),
    ),
    sqlite_autoincrement=True,
)

key = Table(
    "key",
    metadata,
    identity(),
    Column("project", INTEGER, ForeignKey("project.id"), nullable=False),
    Column("name", Text, nullable=False),
    UniqueConstraint("project", "name"),
    sqlite_autoincrement=True,
)

PARAM, TAG = 1, 2

attribute = Table(
    "attribute",
    metadata,
    Column("run", INTEGER, primary_key=True, autoincrement=False),
    Column("kind", SmallInteger, primary_key=True, autoincrement=False),  # PARAM or TAG
    Column("key", INTEGER, primary_key=True, autoincrement=False),
    Column("value", Text, nullable=False),
    sqlite_with_rowid=False,
)
Index(
    "attribute_by_value",
    attribute.c.key,
    attribute.c.kind,
    func.substr(attribute.c.value, text("1"), text(str(INDEXED_LENGTH))),
    attribute.c.run,
)

latest = Table(
    "latest",
    metadata,
    Column("run", INTEGER, primary_key=True, autoincrement=False),
    Column("key", INTEGER, primary_key=True, autoincrement=False),
    Column("step", BigInteger, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("value", Double),  # NULL is NaN: SQLite cannot hold NaN
    Index("latest_by_value", "key", "value", "run"),
    sqlite_with_rowid=False,
)

tail = Table(
    "tail",
    metadata,
    identity(),
    Column("run", INTEGER, nullable=False),
    Column("points", Integer, nullable=False),
    Column("body", LargeBinary, nullable=False),  # see points.py
    Index("tail_by_run", "run", "id"),
    sqlite_autoincrement=True,  # a sealer deletes rows by number: a number that came back would delete unsealed points
)

chunk = Table(
    "chunk",
    metadata,
    Column("run", INTEGER, primary_key=True, autoincrement=False),
    Column("key", INTEGER, primary_key=True, autoincrement=False),
    Column("number", INTEGER, primary_key=True, autoincrement=False),
    Column("points", Integer, nullable=False),
    Column("first_at", BigInteger, nullable=False),  # least and greatest timestamp, to skip chunks behind a page token
    Column("last_at", BigInteger, nullable=False),
    Column("least_step", BigInteger, nullable=False),  # to skip chunks outside a range of steps
    Column("greatest_step", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),  # see chunks.py
)

batch = Table(
    "batch",
    metadata,
    Column("run", INTEGER, primary_key=True, autoincrement=False),
    Column("client", Text, primary_key=True),
    Column("last", BigInteger, nullable=False),  # number of the last accepted record
    sqlite_with_rowid=False,
)

command = Table(
    "command",
    metadata,
    Column("run", INTEGER, primary_key=True, autoincrement=False),
    Column("number", INTEGER, primary_key=True, autoincrement=False),
    Column("action", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("acknowledged_at", BigInteger),
    Column("result", Text),
    sqlite_with_rowid=False,
)

run_input = Table(
    "input",
    metadata,
    Column("run", INTEGER, primary_key=True, autoincrement=False),
    Column("name", Text, primary_key=True),
    Column("digest", Text, primary_key=True),
    Column("source_type", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("schema", Text),
    Column("profile", Text),
    Column("context", Text),  # of its tags, for searches
    Column("tags", Text, nullable=False),  # JSON
)

model_link = Table(
    "model_link",
    metadata,
    Column("run", INTEGER, primary_key=True, autoincrement=False),
    Column("direction", Text, primary_key=True),
    Column("model_id", Text, primary_key=True),
    Column("step", BigInteger, nullable=False),
    Index("model_link_by_model", "model_id", "run"),
)

artifact = Table(
    "artifact",
    metadata,
    # A logged model owns artifacts too: then this is its number with a minus. One table keeps blobs easy to count.
    Column("run", INTEGER, primary_key=True, autoincrement=False),
    Column("key", BYTEWISE, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Index("artifact_by_blob", "sha256"),
)

blob = Table(
    "blob",
    metadata,
    # Each project has its own row: a project that knows a hash must not get the bytes of another one.
    Column("project", INTEGER, ForeignKey("project.id"), primary_key=True, autoincrement=False),
    Column("sha256", Text, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Index("blob_by_sha256", "sha256"),
)

pool = Table(
    "pool",
    metadata,
    identity("pk"),
    Column("project", INTEGER, ForeignKey("project.id"), nullable=False),
    Column("id", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("provider", Text, nullable=False),
    Column("user", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("nodes", BigInteger, nullable=False),
    Column("started_at", BigInteger, nullable=False),
    Column("ready_at", BigInteger),
    Column("ended_at", BigInteger),
    Column("heard_at", BigInteger, nullable=False),  # last batch; an overdue pool is shown as lost
    Column("reason", Text, nullable=False),
    Column("price", Double, nullable=False),  # USD per hour, since `cost_at`
    Column("spent", Double, nullable=False),  # USD until `cost_at`
    Column("cost_at", BigInteger, nullable=False),
    Column("calls", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("lost", BigInteger, nullable=False),
    Column("replaced", BigInteger, nullable=False),
    Column("client", Text, nullable=False),  # the process that numbers the records
    Column("last", BigInteger, nullable=False),  # number of its last accepted record
    Index("pool_by_start", "project", "started_at", "pk"),
    sqlite_autoincrement=True,
)

OF_CALL, OF_REST = "kind IN ('call', 'call.began')", "kind NOT IN ('call', 'call.began')"
"""Events about calls, and all others. Each has an index of its own, because a page shows the ends of both lists."""

pool_event = Table(
    "pool_event",
    metadata,
    Column("pool", INTEGER, ForeignKey("pool.pk"), primary_key=True, autoincrement=False),
    Column("number", BigInteger, primary_key=True, autoincrement=False),  # that of its record
    Column("at", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("node", BigInteger),
    Column("body", Text, nullable=False),  # JSON
    Index("pool_event_of_call", "pool", "number", sqlite_where=text(OF_CALL), postgresql_where=text(OF_CALL)),
    Index("pool_event_of_rest", "pool", "number", sqlite_where=text(OF_REST), postgresql_where=text(OF_REST)),
)
