"""Failures of a database, sorted by what can be done about them."""

from __future__ import annotations

import sqlite3
from enum import Enum, auto

from ..model.refusal import Reason, Refusal


class Failure(Enum):
    """Consequence of a database error for the transaction that met it."""

    CONFLICT = auto()
    """Another server was in the way. The same transaction will succeed when it is run again."""
    UNAVAILABLE = auto()
    """The disk is full, or the database is away. Clients retry; reads may go on."""
    OTHER = auto()
    """The statement's own fault."""


def driver_error(error: BaseException) -> BaseException:
    """Return the driver's own exception behind one of SQLAlchemy."""
    return getattr(error, "orig", None) or error


def breaks_transaction(error: BaseException) -> bool:
    """Report whether an operation's exception concerns the whole transaction.

    A violated constraint does not: the operation's savepoint undoes it. Neither does an exception of the hub's own.
    """
    cause = driver_error(error)
    names = {base.__name__ for base in type(cause).__mro__}
    is_of_driver = type(cause).__module__.split(".")[0] in {"sqlite3", "psycopg", "sqlalchemy"}
    return is_of_driver and "IntegrityError" not in names


def classify(error: BaseException) -> Failure:
    """Sort an exception of either driver."""
    cause = driver_error(error)
    if isinstance(cause, sqlite3.Error):
        return _classify_sqlite(cause)
    state = getattr(cause, "sqlstate", None)
    if state in {"40001", "40P01"}:  # serialization failure, deadlock
        return Failure.CONFLICT
    if state is not None:  # 53: out of disk, memory or connections; 57: shut down; 58: input or output; 08: connection
        return Failure.UNAVAILABLE if state[:2] in {"53", "57", "58", "08", "25"} else Failure.OTHER
    is_away = type(cause).__module__.startswith("psycopg") and type(cause).__name__ == "OperationalError"
    return Failure.UNAVAILABLE if is_away else Failure.OTHER


def _classify_sqlite(error: sqlite3.Error) -> Failure:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    away = {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_NOMEM,
    }
    return Failure.UNAVAILABLE if code in away else Failure.OTHER


def value_fault(error: Exception) -> Refusal | None:
    """Return the refusal for a parameter that no database can hold. None: the error is another one.

    Fields are checked before, with their names. This is for those that were forgotten: a permanent fault is the
    client's, not the server's.
    """
    names = {base.__name__ for base in type(error).__mro__ if base.__module__ in {"sqlite3", "psycopg"}}
    if isinstance(error, OverflowError | UnicodeEncodeError) or "DataError" in names:
        return Refusal(
            Reason.INVALID, "value: a number beyond 64 bits, or a text with characters that are no text; mend it"
        )
    return None


def was_interrupted(error: BaseException) -> bool:
    """Report whether a statement was ended because its time was up."""
    cause = driver_error(error)
    return (
        getattr(cause, "sqlite_errorcode", 0) == sqlite3.SQLITE_INTERRUPT
        or getattr(cause, "sqlstate", "") == "57014"  # query_canceled
    )


def took_too_long(seconds: float) -> Refusal:
    """Make the refusal for a search that takes too long. It would again, so clients must not repeat it."""
    return Refusal(
        Reason.INVALID,
        f"filter: the search took longer than {seconds:g} s; search fewer experiments, or use fewer LIKE patterns",
        field="filter",
    )


def unavailable(error: BaseException) -> Refusal:
    """Make the refusal for a database that cannot be used now. It names no path and no SQL."""
    cause = driver_error(error)
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    full = code == sqlite3.SQLITE_FULL or getattr(cause, "sqlstate", "") == "53100"
    problem = "the hub's disk is full" if full else "the hub's database cannot be used now"
    return Refusal(Reason.UNAVAILABLE, f"database: {problem}; try again later")
