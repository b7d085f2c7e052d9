"""The hub's database: one writer that shares commits between requests, and readers beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from ..model.refusal import Refusal
from .clock import DatabaseClock, milliseconds
from .engines import database_url, open_engine, sqlite_path, unusable
from .failures import Failure, classify, unavailable
from .lock import ProcessLock, make_folder
from .schema import prepare_schema
from .sealer import Sealer
from .transaction import ReadSnapshot, Transaction
from .writer import GroupWriter

P = ParamSpec("P")
T = TypeVar("T")

READERS, SEARCHERS = 4, 3
"""Threads that read, and those that search. All others go on while the longest searches are at work."""


class Database:
    """SQLite or PostgreSQL, ready for use: an empty one gets its tables, an old one its migrations.

    Operations are plain functions. Writers take a `Transaction` first, readers a `ReadSnapshot`. An operation may run
    more than once before it is committed, so it changes nothing but the database; `tx.after_commit` is for the rest.

    Args:
        url: `sqlite:///FILE` or `postgresql://USER@HOST/NAME`.
        clock: Wall clock in milliseconds. By default that of PostgreSQL's server, so that all servers of a hub have
            one, and this machine's with SQLite.
        migrate: Whether an older database is migrated. Otherwise it is refused, as a newer one always is.
        search_s: Seconds that a search may take.

    Raises:
        UsageError: The database cannot be reached or written, is of a newer program, or is in use by another process
            (SQLite).
    """

    def __init__(
        self, url: str, *, clock: Callable[[], int] | None = None, migrate: bool = True, search_s: float = 15.0
    ) -> None:
        address = database_url(url)
        self.path = sqlite_path(address)
        self.clock = clock or (DatabaseClock() if self.path is None else milliseconds)
        self._lock: ProcessLock | None = None
        if self.path is not None:
            make_folder("data", self.path.parent)
            self._lock = ProcessLock(self.path.with_name(self.path.name + ".lock"))
        self._write_engine: Engine = open_engine(address, connections=1, writes=True)
        self._read_engine: Engine = open_engine(address, connections=READERS + SEARCHERS, writes=False)
        try:
            self._look_at_clock(self._write_engine)
            prepare_schema(self._write_engine, self.clock(), migrate=migrate)
        except DBAPIError as error:
            self._close_engines()
            raise unusable(address, error) from error
        except BaseException:
            self._close_engines()
            raise
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="skyward-hub-reader")
        self._searchers = ThreadPoolExecutor(SEARCHERS, thread_name_prefix="skyward-hub-searcher")
        self._search_s = search_s
        self._writer = GroupWriter(self._write_engine, self.clock, self._note)
        self.sealer = Sealer(self)

    @property
    def is_postgresql(self) -> bool:
        return self.path is None

    async def look_at_clock(self) -> None:
        """Follow the clock of PostgreSQL's server. Call it each few seconds; with any other clock it does nothing."""
        await asyncio.to_thread(self._look_at_clock, self._read_engine)

    async def write(
        self, operation: Callable[Concatenate[Transaction, P], T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Run `operation(tx, *arguments)` on the writer's thread, and return its value once the commit is durable.

        Operations that wait at the same time share one commit. One that raises is undone alone, by its savepoint.

        Raises:
            Refusal: The operation's own; or UNAVAILABLE, when the disk is full or the database is away.
        """
        return await asyncio.wrap_future(self._submit(operation, arguments, options))

    async def write_to_run(
        self,
        run: tuple[int, str],
        operation: Callable[Concatenate[Transaction, P], T],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T:
        """Do what `write` does, for an operation that begins with `find_run`.

        Operations that wait at the same time share the look-up of their runs.

        Args:
            run: Number of its project, and its id.
            operation: As for `write`.
            *arguments: As for `write`.
            **options: As for `write`.
        """
        return await asyncio.wrap_future(self._writer.submit(operation, arguments, options, run))

    def write_and_wait(
        self, operation: Callable[Concatenate[Transaction, P], T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Do what `write` does, for threads without an event loop: commands, and the sealer."""
        return self._submit(operation, arguments, options).result()

    async def read(
        self, operation: Callable[Concatenate[ReadSnapshot, P], T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Run `operation(snapshot, *arguments)` on a reader's thread.

        Raises:
            Refusal: The operation's own; or UNAVAILABLE, when the database is away.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, lambda: self.read_and_wait(operation, *arguments, **options))

    async def search(
        self, operation: Callable[Concatenate[ReadSnapshot, P], T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Do what `read` does for a search, whose filter decides how long it takes.

        Searches have threads of their own, so long ones delay no other request.

        Raises:
            Refusal: As for `read`; or INVALID, when its time is up.
        """

        def limited(snapshot: ReadSnapshot) -> T:
            with snapshot.time_limit(self._search_s):
                return operation(snapshot, *arguments, **options)

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._searchers, lambda: self.read_and_wait(limited))

    def read_and_wait(
        self, operation: Callable[Concatenate[ReadSnapshot, P], T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Do what `read` does, on the calling thread."""
        attempt = 0
        while True:
            try:
                return self._read(operation, arguments, options)
            except Refusal:
                raise
            except Exception as error:
                if classify(error) is Failure.OTHER:
                    raise
                attempt += 1
                # No connection of the pool outlives a restart of the server, so one attempt has a new one.
                if attempt > READERS + SEARCHERS:
                    raise unavailable(error) from error

    def close(self) -> None:
        """Commit what was accepted, and close the database. Calling it again does nothing."""
        self.sealer.close()
        self._writer.close()
        self._readers.shutdown()
        self._searchers.shutdown()
        self._close_engines()

    def _look_at_clock(self, engine: Engine) -> None:
        if isinstance(self.clock, DatabaseClock):
            with engine.connect() as connection:
                self.clock.look(connection)

    def _note(self, logged: Mapping[int, tuple[int, set[int]]]) -> None:
        self.sealer.note(logged)

    def _close_engines(self) -> None:
        self._read_engine.dispose()
        self._write_engine.dispose()
        if self._lock is not None:
            self._lock.release()

    def _submit(self, operation: Callable[..., T], arguments: tuple[Any, ...], options: dict[str, Any]) -> Future[T]:
        return self._writer.submit(operation, arguments, options)

    def _read(self, operation: Callable[..., T], arguments: tuple[Any, ...], options: dict[str, Any]) -> T:
        connection = self._read_engine.connect()
        try:
            connection.begin()
            return operation(ReadSnapshot(connection), *arguments, **options)
        except Exception as error:
            if classify(error) is Failure.UNAVAILABLE:
                connection.invalidate()
            raise
        finally:
            with suppress(Exception):  # a lost connection
                connection.close()
