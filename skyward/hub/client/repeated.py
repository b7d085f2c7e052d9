"""Requests to a hub that are repeated while it is away: it may be restarted under a search of hours."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from ...errors import HubError
from .connection import HubConnection
from .settings import Address

RETRY_S = 60.0
"""Seconds for which a request to a hub that is away is repeated. A hub that is restarted is back in one."""
_PAUSES_S = (0.05, 2.0)


class RepeatedRequests:
    """Requests to a hub by any thread, repeated while the hub is away. It may be forked and pickled.

    Args:
        address: The hub.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._local = threading.local()

    def __getstate__(self) -> Address:
        return self.address

    def __setstate__(self, address: Address) -> None:
        self.__init__(address)  # type: ignore[misc]

    def close(self) -> None:
        """Close the connection of this thread. The next request opens it again."""
        self._connection().close()

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        retry_s: float = RETRY_S,
    ) -> Any:
        """Send a request and return its answer. It is repeated for `retry_s` while the hub is away.

        Raises:
            HubError: The hub refuses it, or is away for too long.
        """
        connection = self._connection()
        ends_at = time.monotonic() + retry_s
        pause_s, longest_s = _PAUSES_S
        while True:
            try:
                return connection.json(method, path, body, query=query)
            except HubError as error:
                if not error.retryable or time.monotonic() + pause_s > ends_at:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _connection(self) -> HubConnection:
        """Return the connection of this thread. A forked process does not go on with that of its parent."""
        connection: HubConnection | None = getattr(self._local, "connection", None)
        if connection is None or self._local.pid != os.getpid():
            connection = self._local.connection = _ThreadConnection(self.address)
            self._local.pid = os.getpid()
        return connection


class _ThreadConnection(HubConnection):
    """Connection that ends with its thread, or with the requests: nobody else closes it."""

    def __del__(self) -> None:
        self.close()
