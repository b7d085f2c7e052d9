"""Tables of registered models, their versions and aliases, and of logged models.

The hub keeps pointers to weights here, never weights. `metadata` of this module has all tables of the hub.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Index, SmallInteger, Table, Text, UniqueConstraint, text

from .sweep_tables import metadata
from .tables import INTEGER, identity

__all__ = [
    "logged_model",
    "logged_model_attribute",
    "logged_model_metric",
    "metadata",
    "model_alias",
    "model_version",
    "model_version_tag",
    "registered_model",
    "registered_model_tag",
]

registered_model = Table(
    "registered_model",
    metadata,
    identity(),
    Column("project", INTEGER, ForeignKey("project.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("owner", Text, nullable=False),  # name of the user who made it
    Column("description", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("tags", Text, nullable=False),  # JSON, for pages of models; `registered_model_tag` is for searches
    UniqueConstraint("project", "name"),
    Index("registered_model_by_update", "project", "updated_at", "name"),
    sqlite_autoincrement=True,
)

registered_model_tag = Table(
    "registered_model_tag",
    metadata,
    Column("model", INTEGER, ForeignKey("registered_model.id"), primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
    sqlite_with_rowid=False,
)

model_version = Table(
    "model_version",
    metadata,
    Column("model", INTEGER, ForeignKey("registered_model.id"), primary_key=True, autoincrement=False),
    Column("version", INTEGER, primary_key=True, autoincrement=False),
    Column("project", INTEGER, nullable=False),
    Column("stage", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("description", Text),
    Column("source", Text, nullable=False),  # as the client spelled it
    Column("location", Text, nullable=False),  # where clients download it
    Column("run_id", Text),
    Column("run_link", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("deleted_at", BigInteger),  # the row stays, so that its number is never used again
    Column("tags", Text, nullable=False),  # JSON, as above
    Index("model_version_by_stage", "model", "stage", "version"),
    Index("model_version_by_update", "project", "updated_at"),
    Index("model_version_by_run", "project", "run_id"),
)

model_version_tag = Table(
    "model_version_tag",
    metadata,
    Column("model", INTEGER, primary_key=True, autoincrement=False),
    Column("version", INTEGER, primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
    sqlite_with_rowid=False,
)

model_alias = Table(
    "model_alias",
    metadata,
    Column("model", INTEGER, ForeignKey("registered_model.id"), primary_key=True, autoincrement=False),
    Column("alias", Text, primary_key=True),
    Column("version", INTEGER, nullable=False),
    Index("model_alias_by_version", "model", "version"),
)

logged_model = Table(
    "logged_model",
    metadata,
    identity("pk"),
    Column("project", INTEGER, ForeignKey("project.id"), nullable=False),
    Column("id", Text, nullable=False),
    Column("experiment", INTEGER, ForeignKey("experiment.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("kind", Text),  # `model_type` of MLflow's API
    Column("run_id", Text),  # run that made it
    Column("status", Text, nullable=False),
    Column("lifecycle", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("params", Text, nullable=False),  # JSON, for pages; `logged_model_attribute` is for searches
    Column("tags", Text, nullable=False),
    UniqueConstraint("project", "id"),
    Index("logged_model_by_creation", "experiment", "lifecycle", text("created_at DESC"), "id"),
    sqlite_autoincrement=True,
)

logged_model_attribute = Table(
    "logged_model_attribute",
    metadata,
    Column("model", INTEGER, primary_key=True, autoincrement=False),
    Column("kind", SmallInteger, primary_key=True, autoincrement=False),  # tables.PARAM or tables.TAG
    Column("key", INTEGER, primary_key=True, autoincrement=False),
    Column("value", Text, nullable=False),
    sqlite_with_rowid=False,
)

logged_model_metric = Table(
    "logged_model_metric",
    metadata,
    Column("model", INTEGER, primary_key=True, autoincrement=False),
    Column("key", INTEGER, primary_key=True, autoincrement=False),
    Column("at", BigInteger, primary_key=True, autoincrement=False),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("run_id", Text, primary_key=True),
    Column("value", Double),  # NULL is NaN
    Column("dataset_name", Text),
    Column("dataset_digest", Text),
    sqlite_with_rowid=False,
)
