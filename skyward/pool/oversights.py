"""Likely mistakes of a pool's program, reported when the pool closes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..calls.active import activity, open_pools
from ..calls.futures import Failures

if TYPE_CHECKING:
    from ..engine.engine import Engine


class Oversights:
    """Watches one pool from its start: failed futures that nobody read, and calls that were never sent."""

    def __init__(self) -> None:
        self.failures = Failures()
        self._calls_made = activity.calls_made
        self._pools_opened = activity.pools_opened
        self._is_alone = not open_pools()

    def found(self, engine: Engine) -> Iterator[str]:
        """Yield one sentence for each kind of oversight. Call it when no call is open."""
        count = self.failures.unread
        if count:
            error = self.failures.first_error()
            kind = f": {type(error).__name__}: {error}" if error is not None else ""
            calls = "1 call failed and its future was" if count == 1 else f"{count} calls failed and their futures were"
            yield f"{calls} not read{kind if count == 1 else f', the first with{kind[1:]}' if kind else ''}"
        if self._sent_nothing(engine):
            call = f"{activity.last_made}(...)"
            yield f"no call was sent, and {call} alone runs nothing; write {call} >> pool"

    def _sent_nothing(self, engine: Engine) -> bool:
        """Return whether calls were made since the start but sent neither to this pool nor, lacking one, to another."""
        now = engine.counts()
        return (
            activity.calls_made > self._calls_made
            and self._is_alone
            and activity.pools_opened <= self._pools_opened + 1
            and not (now.ended or now.failed or now.busy or now.queued)
        )
