"""Entry of Alembic: it migrates on the connection that `schema.prepare_schema` gives, in that transaction."""

from __future__ import annotations

from alembic import context

from skyward.hub.store.registry_tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite changes a column by copying its table
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
