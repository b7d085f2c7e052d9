"""Clocks of a hub: that of this machine, and that of a PostgreSQL server."""

from __future__ import annotations

import time

from sqlalchemy import Connection


def milliseconds() -> int:
    """Read the wall clock of this machine, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class DatabaseClock:
    """Wall clock of a PostgreSQL server, so that servers whose own clocks differ agree on the time.

    Call it for the milliseconds since 1970. Between two looks at the server it counts on by a clock that nobody sets.
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> int:
        return int((time.monotonic() + self._offset_s) * 1000)

    def look(self, connection: Connection) -> None:
        """Read the server's clock."""
        asked = time.monotonic()
        row = connection.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
        assert row is not None
        self._offset_s = float(row[0]) - (asked + time.monotonic()) / 2
