"""Workers that are present: their ids, the processes behind the ids, and their heartbeats.

Time is a number of seconds from any clock that never goes back. Only the server's clock counts, so the clocks of
workers may differ by hours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError
from .refusal import RefusalKind, WorkerRefused


@dataclass(slots=True)
class _Presence:
    session: str
    heard_at: float


class Roster:
    """Table of the workers that are present, in the order in which they joined.

    A worker is an id. The process behind it has a session: a random text that it keeps in its checkpoint. So a process
    that was killed and resumed is the same worker at once. Another process with the same id is refused until the first
    one has left or was evicted.

    Args:
        heartbeat_timeout_s: Seconds without a message after which a worker is evicted; 0: never.
    """

    def __init__(self, *, heartbeat_timeout_s: float = 120.0) -> None:
        if not (math.isfinite(heartbeat_timeout_s) and heartbeat_timeout_s >= 0):
            raise UsageError(
                f"heartbeat_timeout_s={heartbeat_timeout_s!r}: must be a finite number >= 0; "
                "set seconds, or 0 to evict nobody"
            )
        self._timeout_s = heartbeat_timeout_s
        self._present: dict[str, _Presence] = {}

    @property
    def workers(self) -> tuple[str, ...]:
        """Ids of the workers that are present, in the order in which they joined."""
        return tuple(self._present)

    def join(self, worker: str, session: str, *, now: float) -> None:
        """Add a worker, or hear from one that is present.

        Raises:
            WorkerRefused: Another session has this id (ID_TAKEN).
        """
        presence = self._present.setdefault(worker, _Presence(session, now))
        if presence.session != session:
            raise self._taken(worker)
        presence.heard_at = max(presence.heard_at, now)

    def hear(self, worker: str, session: str, *, now: float) -> None:
        """Note a message of a worker, such as a heartbeat.

        Raises:
            WorkerRefused: The worker is not present (NOT_A_MEMBER), or another session has its id (ID_TAKEN).
        """
        self.check(worker, session)
        self._present[worker].heard_at = max(self._present[worker].heard_at, now)

    def check(self, worker: str, session: str) -> None:
        """Raise as `hear` does, and note nothing."""
        if worker not in self._present:
            raise WorkerRefused(
                RefusalKind.NOT_A_MEMBER,
                f"worker={worker!r}: is not present: it was evicted, left or never joined; join, and keep the delta",
            )
        if self._present[worker].session != session:
            raise self._taken(worker)

    def silence(self, worker: str, *, now: float) -> float:
        """Return the seconds since the last message of a worker that is present."""
        return max(0.0, now - self._present[worker].heard_at)

    def remove(self, worker: str) -> str | None:
        """Remove a worker, and return its session; None if it is not present."""
        presence = self._present.pop(worker, None)
        return None if presence is None else presence.session

    def silent(self, *, now: float) -> tuple[str, ...]:
        """Return the workers whose last message is at least the timeout ago, in the order of their ids."""
        if self._timeout_s == 0:
            return ()
        return tuple(sorted(w for w, presence in self._present.items() if now - presence.heard_at >= self._timeout_s))

    def _taken(self, worker: str) -> WorkerRefused:
        return WorkerRefused(
            RefusalKind.ID_TAKEN,
            f"worker={worker!r}: another process trains under this id; use another worker_id, or evict that one first",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the workers and their sessions, as values for JSON."""
        return {worker: presence.session for worker, presence in self._present.items()}

    def load_state_dict(self, state: Mapping[str, str], *, now: float) -> None:
        """Continue with workers that `state_dict` returned. All count as heard at `now`."""
        self._present = {worker: _Presence(session, now) for worker, session in state.items()}


class RosterOfRounds:
    """Base of the state machines of rounds: the calls that concern the presence of workers.

    Args:
        heartbeat_timeout_s: Seconds of silence after which a worker is evicted; 0: never.
    """

    def __init__(self, *, heartbeat_timeout_s: float) -> None:
        self._roster = Roster(heartbeat_timeout_s=heartbeat_timeout_s)

    @property
    def workers(self) -> tuple[str, ...]:
        """Workers that are present, in the order in which they joined."""
        return self._roster.workers

    def silence(self, worker: str, *, now: float) -> float:
        """Return the seconds since the last message of a worker that is present."""
        return self._roster.silence(worker, now=now)

    def hear(self, worker: str, session: str, *, now: float) -> None:
        """Note a heartbeat.

        Raises:
            WorkerRefused: The worker is not present (NOT_A_MEMBER), or another process has its id (ID_TAKEN).
        """
        self._roster.hear(worker, session, now=now)

    def leave(self, worker: str, session: str, *, has_ended: bool = False) -> None:
        """Remove a worker that says so. The round may be complete afterwards.

        Args:
            worker: Its id.
            session: Session of its process.
            has_ended: Whether its training has come to its end, so that nobody need wait for its return.

        Raises:
            WorkerRefused: The worker is not present (NOT_A_MEMBER), or another process has its id (ID_TAKEN).
        """
        self._roster.check(worker, session)
        self.evict(worker)

    def evict(self, worker: str) -> None:
        """Remove a worker, whichever process it is. One that is not present changes nothing."""
        self._roster.remove(worker)

    def evict_silent(self, *, now: float) -> tuple[str, ...]:
        """Evict all workers that were silent for the timeout, and return their ids in order."""
        silent = self._roster.silent(now=now)
        for worker in silent:
            self.evict(worker)
        return silent
