"""Connections to SQLite and PostgreSQL, set up the way the hub needs them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import QueuePool

from ...errors import UsageError

SQLITE_SETTINGS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",  # an acknowledged point survives a power cut
    "PRAGMA foreign_keys = ON",
    "PRAGMA case_sensitive_like = ON",  # as MLflow's search wants it
    "PRAGMA temp_store = MEMORY",
    "PRAGMA cache_size = -16000",  # KiB
    # Debian's SQLite fills deleted pages with zeros: to delete the output of a job wrote hundreds of megabytes, while
    # all others waited. As elsewhere, these pages keep their content until they are used again.
    "PRAGMA secure_delete = FAST",
)


@lru_cache(maxsize=512)
def in_postgresql(sql: str) -> str:
    """Translate the placeholders of the hub's SQL, which has no literal `?` and no literal `%`."""
    return sql.replace("?", "%s")


def database_url(url: str) -> URL:
    """Parse the address of a database.

    Args:
        url: `sqlite:///FILE` or `postgresql://USER@HOST/NAME`.

    Raises:
        UsageError: It is no address, or names another kind of database.
    """
    try:
        address = make_url(url)
    except ArgumentError:  # its text may hold a password
        raise UsageError("database: is not an address; use sqlite:///FILE or postgresql://USER@HOST/NAME") from None
    if address.get_backend_name() == "postgresql":
        return address.set(drivername="postgresql+psycopg")
    if address.get_backend_name() == "sqlite" and address.database:
        return address.set(drivername="sqlite")
    raise UsageError(
        f"database={address.render_as_string(hide_password=True)!r}: is not a database of the hub; "
        "use sqlite:///FILE or postgresql://USER@HOST/NAME"
    )


def unusable(address: URL, error: DBAPIError) -> UsageError:
    """Describe why a database cannot be used."""
    shown = address.render_as_string(hide_password=True)
    problem = str(error.orig).partition("\n")[0]
    is_sqlite = address.get_backend_name() == "sqlite"
    advice = "name another folder, or restore a backup" if is_sqlite else "check the address, and that its server runs"
    return UsageError(f"database={shown!r}: cannot be used ({problem}); {advice}")


def sqlite_path(address: URL) -> Path | None:
    """Return the file of an SQLite database, None for PostgreSQL."""
    return Path(str(address.database)) if address.get_backend_name() == "sqlite" else None


def open_engine(address: URL, *, connections: int, writes: bool) -> Engine:
    """Make the connections of the writer, or those of the readers.

    Args:
        address: Where the database is.
        connections: How many may be open at once.
        writes: False for readers: their transactions are snapshots, and a write in one is an error.
    """
    if address.get_backend_name() == "sqlite":
        return _open_sqlite(address, connections, writes)
    engine = create_engine(
        address,
        poolclass=QueuePool,
        pool_size=connections,
        max_overflow=0,
        isolation_level="READ COMMITTED" if writes else "REPEATABLE READ",
        connect_args={"connect_timeout": 5},
    )
    if not writes:
        # Once for each connection. The engine's option `postgresql_readonly` sets and resets it for each use, which
        # psycopg refuses while a transaction is open.
        @event.listens_for(engine, "connect")
        def _only_reads(connection: Any, _record: object) -> None:
            connection.read_only = True

    return engine


def _open_sqlite(address: URL, connections: int, writes: bool) -> Engine:
    engine = create_engine(
        address,
        poolclass=QueuePool,
        pool_size=connections,
        max_overflow=0,
        # The driver must not begin transactions by itself: it knows neither IMMEDIATE nor snapshots.
        connect_args={"isolation_level": None, "check_same_thread": False, "timeout": 30, "cached_statements": 512},
    )

    @event.listens_for(engine, "connect")
    def _set_up(connection: Any, _record: object) -> None:
        for setting in SQLITE_SETTINGS:
            connection.execute(setting)
        if not writes:
            connection.execute("PRAGMA query_only = ON")

    begin = "BEGIN IMMEDIATE" if writes else "BEGIN"

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        connection.exec_driver_sql(begin)

    return engine
