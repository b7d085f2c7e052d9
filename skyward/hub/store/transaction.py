"""Transactions as operations of the store see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from .engines import in_postgresql
from .failures import took_too_long, value_fault, was_interrupted

if TYPE_CHECKING:
    from ..model.points import PointColumns
    from .key_cache import KeyCache


_STEPS = 10_000
"""Instructions of SQLite's virtual machine between two looks at the clock: some milliseconds."""


class ReadSnapshot:
    """A consistent view of the database, for reading.

    Attributes:
        connection: SQLAlchemy's connection, in a transaction. Never commit or close it.
        is_postgresql: The dialect. False is SQLite.
        known_runs: Rows of runs by project and id, see `runs.look_up`.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._driver: Any = connection.connection.driver_connection
        self.is_postgresql = connection.dialect.name == "postgresql"
        self.known_runs: dict[tuple[int, str], Sequence[Any]] = {}

    @property
    def connection(self) -> Connection:
        return self._connection

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> Any:
        """Run one statement by the driver itself and return its cursor.

        A tenth of what SQLAlchemy's `execute` costs, which counts on the hot paths.

        Args:
            sql: SQL that both databases understand, with `?` for each parameter. It has no literal `?` or `%`.
            parameters: Their values.

        Raises:
            Refusal: A value is none that a database can hold.
        """
        try:
            return self._driver.execute(in_postgresql(sql) if self.is_postgresql else sql, parameters)
        except Exception as error:
            raise value_fault(error) or error from None

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Refuse the statements of the block if they take longer. In PostgreSQL, each statement has the whole time."""
        if self.is_postgresql:
            self._driver.execute(f"SET LOCAL statement_timeout = {max(1, int(seconds * 1000))}")
        else:
            ends_at = time.monotonic() + seconds
            self._driver.set_progress_handler(lambda: time.monotonic() > ends_at, _STEPS)
        try:
            yield
        except Exception as error:
            if was_interrupted(error):
                raise took_too_long(seconds) from None
            raise
        finally:
            if not self.is_postgresql:
                self._driver.set_progress_handler(None, 0)


class Transaction(ReadSnapshot):
    """The writer's transaction, shared by the operations of one commit.

    Attributes:
        now: Time of the commit's beginning, in milliseconds since 1970.
        keys: Ids of committed keys.
        points: Points that the operations logged. They are written together, before the commit.
        logged: Number and keys of the points that were written, for each run.
        runs_with_points: Runs that are known to have committed points.
        new_keys: Ids of keys that this transaction made, which others must not use before it is committed.
    """

    def __init__(self, connection: Connection, now: int, keys: KeyCache, runs_with_points: set[int]) -> None:
        super().__init__(connection)
        self.now = now
        self.keys = keys
        self.runs_with_points = runs_with_points
        self.points: list[tuple[int, int, PointColumns]] = []
        self.logged: dict[int, tuple[int, set[int]]] = {}
        self.new_keys: dict[tuple[int, str], int] = {}
        self._callbacks: list[Callable[[], object]] = []
        self._marks: tuple[int, int] | None = None
        self._points_before = self.points
        self._has_savepoint = False

    @property
    def connection(self) -> Connection:
        self._mark()
        return self._connection

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> Any:
        if not sql.startswith("SELECT"):
            self._mark()
        return super().execute(sql, parameters)

    def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        """Run one statement for each of `rows`."""
        self._mark()
        cursor = self._driver.cursor()
        try:
            cursor.executemany(in_postgresql(sql) if self.is_postgresql else sql, rows)
        except Exception as error:
            raise value_fault(error) or error from None

    def execute_at_once(self, *statements: tuple[str, Sequence[object]]) -> None:
        """Run statements of PostgreSQL, with the placeholders of its driver, in one round trip."""
        self._mark()
        with self._driver.pipeline():
            for sql, parameters in statements:
                self._driver.execute(sql, parameters)

    @property
    def for_update(self) -> str:
        """End of a SELECT whose rows this transaction is about to change, so that no other server changes them."""
        return " FOR UPDATE" if self.is_postgresql else ""

    def after_commit(self, callback: Callable[[], object]) -> None:
        """Call `callback` on the writer's thread once the commit is durable, and never if it fails."""
        self._callbacks.append(callback)

    def begin_operation(self) -> None:
        """Remember where an operation begins. Its savepoint is made by the first statement that changes something.

        Most operations only look up their run before their points join those of the others. Two round trips for a
        savepoint took PostgreSQL and the writer as long as that look.
        """
        self._marks = (len(self.points), len(self._callbacks))
        self._points_before = self.points
        self._has_savepoint = False

    @property
    def is_beyond_undoing(self) -> bool:
        """Tell whether the operation cannot be undone alone.

        It has written the points of others behind its savepoint, or it has none and PostgreSQL refused a statement.
        """
        assert self._marks is not None
        if self.points is not self._points_before and self._marks[0]:
            return True
        return self.is_postgresql and not self._has_savepoint and self._driver.info.transaction_status.name == "INERROR"

    def end_operation(self) -> None:
        """Keep what the operation did."""
        if self._has_savepoint:
            self._driver.execute("RELEASE SAVEPOINT operation")
        self._marks = None

    def undo_operation(self) -> None:
        """Undo what the operation did."""
        assert self._marks is not None
        if self._has_savepoint:
            self._driver.execute("ROLLBACK TO SAVEPOINT operation")
            self._driver.execute("RELEASE SAVEPOINT operation")
        points, callbacks = self._marks
        del self.points[points:], self._callbacks[callbacks:]
        self.new_keys.clear()  # some of them are gone; the others are found again
        self._marks = None

    @property
    def callbacks(self) -> Sequence[Callable[[], object]]:
        """Functions that `after_commit` collected."""
        return self._callbacks

    def _mark(self) -> None:
        self.known_runs.clear()  # the statement that follows may change them
        if self._marks is not None and not self._has_savepoint:
            self._has_savepoint = True
            self._driver.execute("SAVEPOINT operation")
