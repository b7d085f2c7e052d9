"""Views of a hub's database for commands that stand beside a running server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import inspect
from sqlalchemy.exc import DatabaseError

from ...errors import UsageError
from .engines import database_url, open_engine, sqlite_path, unusable
from .schema import HEAD
from .transaction import ReadSnapshot


@contextmanager
def snapshot_of(url: str) -> Iterator[ReadSnapshot]:
    """Hold one consistent view of a hub's database. A server may write at the same time.

    Args:
        url: `sqlite:///FILE` or `postgresql://USER@HOST/NAME`.

    Raises:
        UsageError: There is no database, or it has another revision than this program.
    """
    address = database_url(url)
    path = sqlite_path(address)
    if path is not None and not path.exists():
        raise UsageError(f"data={str(path.parent)!r}: has no hub in it; name the folder of a hub")
    engine = open_engine(address, connections=1, writes=False)
    try:
        with engine.connect() as connection:
            connection.begin()
            _check_revision(ReadSnapshot(connection), inspect(connection).get_table_names())
            yield ReadSnapshot(connection)
    except DatabaseError as error:
        raise unusable(address, error) from error
    finally:
        engine.dispose()


def _check_revision(snapshot: ReadSnapshot, tables: list[str]) -> None:
    if "alembic_version" not in tables:
        raise UsageError("database: has no tables of a hub; name the database of one")
    revision = str(snapshot.execute("SELECT version_num FROM alembic_version").fetchone()[0])
    if revision != HEAD:
        raise UsageError(
            f"database: its tables have revision {revision!r}, and this program reads {HEAD!r}; "
            "run `skyward hub migrate`, or install the version of skyward that wrote it"
        )
