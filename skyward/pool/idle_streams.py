"""Streams that hold slots although nobody reads them: the reason why a call waits, and a hint for the user."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

from ..engine.engine import Engine
from ..engine.tasks import ResultStream

IDLE_S = 5.0
"""Seconds without a read after which a stream with values counts as idle, and that a call waits before the hint."""


class IdleStreams:
    """Watches the streams of one pool. Thread-safe.

    A loop over a stream in a variable leaves the stream open, because the loop may go on later. So its slot stays held.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._names: weakref.WeakKeyDictionary[ResultStream[Any], str] = weakref.WeakKeyDictionary()
        self._hinted: weakref.WeakSet[ResultStream[Any]] = weakref.WeakSet()
        self._stuck_since: float | None = None

    def add(self, stream: ResultStream[Any], name: str) -> None:
        """Watch a stream of this function until it is dropped."""
        with self._lock:
            self._names[stream] = name

    def why_waiting(self, call: int) -> str:
        """Return the engine's reason why a call waits, and the idle streams that hold slots meanwhile."""
        why = self._engine.why_waiting(call)
        idle = self._idle() if why else {}
        return f"{why}; {_held(idle)}" if idle else why

    def hint(self) -> str:
        """Return a hint once calls have waited for `IDLE_S` only for idle streams; "" otherwise. Call it regularly.

        Each stream is named once.
        """
        idle = self._idle()
        if not idle or not self._hold_all(len(idle)):
            self._stuck_since = None
            return ""
        now = time.monotonic()
        if self._stuck_since is None:
            self._stuck_since = now
        new = {stream: name for stream, name in idle.items() if stream not in self._hinted}
        if not new or now - self._stuck_since < IDLE_S:
            return ""
        self._hinted.update(new)
        return f"calls wait for a slot; {_held(new)}"

    def _idle(self) -> dict[ResultStream[Any], str]:
        with self._lock:
            return {stream: name for stream, name in self._names.items() if stream.unread_s > IDLE_S}

    def _hold_all(self, count: int) -> bool:
        """Return whether calls wait for nothing but a slot while this number of streams fills all busy slots."""
        counts = self._engine.counts()
        return counts.queued > 0 and counts.busy <= count and not counts.why


def _held(streams: dict[ResultStream[Any], str]) -> str:
    """Describe idle streams, and how to free their slots."""
    names = ", ".join(map(repr, dict.fromkeys(streams.values())))
    if len(streams) == 1:
        held = f"a stream of {names} holds a slot, and nobody has read it for {IDLE_S:g} s"
        return f"{held}; call its close(), or read it to its end"
    held = f"{len(streams)} streams of {names} hold slots, and nobody has read them for {IDLE_S:g} s"
    return f"{held}; call close() of each, or read them to their end"
