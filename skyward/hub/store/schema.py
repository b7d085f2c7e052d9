"""Tables of a database: made where it is empty, migrated where it is older, refused where it is newer."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from ...errors import UsageError
from . import registry_tables

HEAD = "0011"
"""Revision of the tables in this program. The newest file below `migrations/versions` has the same."""
REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009", "0010", "0011")
"""All revisions that this program knows, in order."""

ORGANIZATION, PROJECT = 1, 1
"""Ids of the organization and the project that each database has from its first day."""
_ANY_LOCK = 0x736B79  # of PostgreSQL's advisory locks: the one that serializes changes of the schema


def prepare_schema(engine: Engine, now: int, *, migrate: bool) -> None:
    """Bring the database to this program's revision.

    Args:
        engine: Connections of the writer.
        now: Time of rows that an empty database gets.
        migrate: Whether an older database is migrated; otherwise it is refused.

    Raises:
        UsageError: It is newer than this program, is of another program, or is older and `migrate` is False.
    """
    with engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ANY_LOCK})
        revision = _revision(connection)
        if revision is None:
            _create(connection, now)
        elif revision != HEAD:
            _check(revision, migrate)
            _migrate(connection)
        connection.commit()


def _revision(connection: Connection) -> str | None:
    tables = inspect(connection).get_table_names()
    if "alembic_version" in tables:
        return str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one())
    if "run" in tables or "experiment" in tables:
        raise UsageError(
            "database: its tables are of another program; name an empty database, or `skyward hub import` from this one"
        )
    return None


def _check(revision: str, migrate: bool) -> None:
    if revision not in REVISIONS:
        raise UsageError(
            f"database: its tables have revision {revision!r}, which is newer than this program's {HEAD!r}; "
            "install the version of skyward that wrote it, or a newer one"
        )
    if not migrate:
        raise UsageError(
            f"database: its tables have revision {revision!r}, which is older than this program's {HEAD!r}; "
            "run `skyward hub migrate` first"
        )


def _create(connection: Connection, now: int) -> None:
    """Make all tables at once. The migrations would take ten times as long, and a test keeps both equal."""
    registry_tables.metadata.create_all(connection, checkfirst=False)
    connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
    connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})
    add_first_rows(connection, now)


def add_first_rows(connection: Connection, now: int) -> None:
    """Add the organization, the project, MLflow's experiment 0 and the lease, which every database has."""
    rows = (
        "INSERT INTO organization (id, name, created_at) VALUES (1, 'default', :now)",
        "INSERT INTO project (id, organization, name, created_at) VALUES (1, 1, 'default', :now)",
        """INSERT INTO experiment (id, project, name, owner, lifecycle, created_at, updated_at, tags)
           VALUES (0, 1, 'Default', '', 'active', :now, :now, '{}')""",
        "INSERT INTO lease (name, holder, fence, expires_at) VALUES ('periodic', '', 0, 0)",
    )
    for row in rows:
        connection.execute(text(row), {"now": now} if ":now" in row else {})
    if connection.dialect.name == "postgresql":  # its counters do not see ids that were given
        for table in ("organization", "project"):
            connection.execute(text(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), 1)"))


def _migrate(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    config.attributes["connection"] = connection
    command.upgrade(config, HEAD)
