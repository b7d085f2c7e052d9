"""The thread that writes: it runs the waiting operations in one transaction, so that they share one flush to disk."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine

from ..model.refusal import Reason, Refusal
from . import runs
from .failures import Failure, breaks_transaction, classify, unavailable
from .key_cache import KeyCache
from .points import flush_points
from .transaction import Transaction

T = TypeVar("T")
OnLogged = Callable[[Mapping[int, tuple[int, set[int]]]], None]
"""Called after each commit with the number and the keys of its points, for each run."""

GROUP = 512
"""Operations of one commit at most: the first one should not wait long for the last one."""
WAITING = 20_000
"""Operations that may wait. Beyond that, the disk is slower than the requests, and clients should wait instead."""
IDLE_S = 30.0
"""Seconds after which PostgreSQL ends a transaction whose server stands still: others wait for its end."""
_log = logging.getLogger(__name__)

ATTEMPTS = 5
"""How often a group is run that another server is in the way of."""


@dataclass(slots=True)
class _Work:
    operation: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    run: tuple[int, str] | None
    future: Future[Any] = field(default_factory=Future)
    value: Any = None
    error: BaseException | None = None


class GroupWriter:
    """Run operations on one thread, in the order in which they came."""

    def __init__(self, engine: Engine, clock: Callable[[], int], on_logged: OnLogged) -> None:
        self._on_logged = on_logged
        self._engine = engine
        self._clock = clock
        self._keys = KeyCache()
        self._runs_with_points: set[int] = set()
        self._connection: Connection | None = None
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._is_committing = False
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="skyward-hub-writer", daemon=True)
        self._thread.start()

    def submit(
        self,
        operation: Callable[..., T],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        run: tuple[int, str] | None = None,
    ) -> Future[T]:
        """Queue an operation. The future gets its value after the commit.

        Args:
            operation: Function of a transaction.
            arguments: Its further arguments.
            options: Its named arguments.
            run: Project and id of a run that it looks up.
        """
        if self._queue.qsize() > WAITING:
            raise Refusal(Reason.LIMITED, f"database: {WAITING} writes wait already; try again later")
        work = _Work(operation, arguments, options, run)
        with self._gate:
            if not self._is_open:
                raise Refusal(Reason.UNAVAILABLE, "database: the hub is shutting down; try again later")
            self._queue.put(work)
        return work.future

    def close(self) -> None:
        """Finish what was queued, and end the thread."""
        with self._gate:
            if not self._is_open:
                return
            self._is_open = False
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            group, goes_on = self._next_group()
            if group:
                self._serve_safely(group)
        self._drop_connection()

    def _serve_safely(self, group: Sequence[_Work]) -> None:
        """Serve a group, and fail it whatever it raises: without this thread, every request would wait for ever."""
        try:
            self._serve(group)
        except BaseException as error:
            self._drop_connection()
            for work in group:
                if not work.future.done():
                    work.future.set_exception(error if isinstance(error, Exception) else _unexpected(error))

    def _next_group(self) -> tuple[list[_Work], bool]:
        work = self._queue.get()
        group: list[_Work] = []
        while work is not None:
            if work.future.set_running_or_notify_cancel():
                group.append(work)
            if len(group) >= GROUP:
                return group, True
            try:
                work = self._queue.get_nowait()
            except queue.Empty:
                return group, True
        return group, False

    def _serve(self, group: Sequence[_Work]) -> None:
        try:
            self._commit(group)
        except Exception as error:
            if classify(error) is not Failure.OTHER:
                for work in group:
                    work.future.set_exception(unavailable(error))
            elif len(group) == 1:
                group[0].future.set_exception(error)
            else:  # one of them breaks the transaction of all: running each alone finds it
                for work in group:
                    self._serve([work])
            return
        for work in group:
            if work.error is not None:
                work.future.set_exception(work.error)
            else:
                work.future.set_result(work.value)

    def _commit(self, group: Sequence[_Work]) -> None:
        """Run a group, again where another server was in its way or the connection had died since the last commit."""
        for attempt in range(1, ATTEMPTS + 1):
            is_fresh = self._connection is None
            try:
                tx = self._run_group(group)
            except Exception as error:
                self._drop_connection()
                failure = classify(error)
                # After COMMIT was sent, nobody knows whether it was carried out. The clients must say what they want.
                was_dead = failure is Failure.UNAVAILABLE and not is_fresh and not self._is_committing
                if attempt == ATTEMPTS or not (failure is Failure.CONFLICT or was_dead):
                    raise
            else:
                self._after_commit(tx)
                return

    def _after_commit(self, tx: Transaction) -> None:
        """Tell others of the commit. It is durable, so nothing here may fail its operations or run them again."""
        callbacks: list[Callable[[], object]] = [*tx.callbacks, partial(self._on_logged, tx.logged)]
        for callback in callbacks:
            try:
                callback()
            except Exception:
                _log.exception("A callback behind a commit failed.")

    def _run_group(self, group: Sequence[_Work]) -> Transaction:
        self._is_committing = False
        if self._connection is None:
            self._connection = self._connect()
        self._connection.begin()
        tx = Transaction(self._connection, self._clock(), self._keys, self._runs_with_points)
        runs.look_up(tx, {work.run for work in group if work.run})
        for work in group:
            self._run_operation(tx, work)
        flush_points(tx)
        self._is_committing = True
        self._connection.commit()
        return tx

    def _connect(self) -> Connection:
        connection = self._engine.connect()
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SET idle_in_transaction_session_timeout = {int(IDLE_S * 1000)}")
            connection.commit()
        return connection

    def _run_operation(self, tx: Transaction, work: _Work) -> None:
        work.value = work.error = None
        tx.begin_operation()
        try:
            work.value = work.operation(tx, *work.arguments, **work.options)
        except Exception as error:
            if breaks_transaction(error) or tx.is_beyond_undoing:
                raise
            tx.undo_operation()
            work.error = error
        else:
            tx.end_operation()

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                connection.rollback()
            with suppress(Exception):
                connection.invalidate()
            with suppress(Exception):
                connection.close()


def _unexpected(error: BaseException) -> RuntimeError:
    """Return what a request raises in place of an exception that would end its own thread."""
    return RuntimeError(f"database: an operation raised {error!r}; report this bug")
