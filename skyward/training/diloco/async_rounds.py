"""Asynchronous rounds: each update is applied as it arrives, whatever its base, and exactly once.

Round r has the parameters after r updates, so a round is a version of the parameters. No worker waits for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ...errors import UsageError
from .dealing import Deal
from .membership import RosterOfRounds
from .refusal import RefusalKind, WorkerRefused
from .rounds import ClosedRound, UpdateAnswer, UpdateKey, UpdateOutcome


class AsyncRounds(RosterOfRounds):
    """State machine with the methods of `Rounds`, whose round is complete with one update.

    The base of an update may be any round since the worker's last answer. So an update that comes again gets its stored
    answer, and an older one of a worker that was resumed from an old checkpoint is refused.

    Args:
        heartbeat_timeout_s: Seconds of silence after which a worker is evicted; 0: never.

    Example:
        >>> rounds = AsyncRounds()
        >>> rounds.join("a", "process of a", now=0.0)
        >>> key = UpdateKey(worker="a", base_round=0, number=0)
        >>> rounds.submit(key, "process of a", now=9.0).kind
        'accepted'
        >>> rounds.close()
        ClosedRound(round=0, counted=('a',), refused=(), base_round=0)
        >>> rounds.submit(key, "process of a", now=9.5).answer
        UpdateAnswer(round=1, is_counted=True)
    """

    def __init__(self, *, heartbeat_timeout_s: float = 120.0) -> None:
        super().__init__(heartbeat_timeout_s=heartbeat_timeout_s)
        self._round = 0
        self._submitted: tuple[UpdateKey, bool] | None = None
        """Update that is applied next, and whether it counts."""
        self._answered: dict[str, tuple[UpdateKey, UpdateAnswer]] = {}
        """Last update of each worker. It stays when the worker goes: it may come back."""

    @property
    def round(self) -> int:
        """Number of updates so far."""
        return self._round

    @property
    def awaited(self) -> tuple[str, ...]:
        """Workers that may send an update: all that are present, in the order of their ids."""
        return tuple(sorted(self._roster.workers))

    @property
    def is_complete(self) -> bool:
        """Readiness to close: an update waits to be applied."""
        return self._submitted is not None

    def join(self, worker: str, session: str, *, now: float, base_round: int | None = None) -> None:
        """Add a worker, or one that comes back. Raises WorkerRefused if another process has this id (ID_TAKEN)."""
        self._roster.join(worker, session, now=now)

    def takes_base(self, worker: str, base_round: int) -> bool:
        """Return whether an update of a present worker may have this base."""
        _, answer = self._answered.get(worker, (None, None))
        return (0 if answer is None else answer.round) <= base_round <= self._round

    @property
    def is_over(self) -> bool:
        """False: nobody waits for others."""
        return False

    def find(self, update: UpdateKey, session: str) -> UpdateOutcome | None:
        """Return the state of a known update; None if `submit` would accept it. Nothing changes.

        Raises:
            WorkerRefused: As `submit`.
        """
        self._roster.check(update.worker, session)
        key, answer = self._answered.get(update.worker, (None, None))
        if key == update:
            return UpdateOutcome(kind="answered", answer=answer)
        if not self.takes_base(update.worker, update.base_round):
            problem = (
                f"base_round={update.base_round} of worker {update.worker!r}: is older than its last answer, or unknown"
            )
            raise WorkerRefused(
                RefusalKind.WRONG_ROUND, f"{problem}; load the parameters of round {self._round} and train from there"
            )
        return None

    def deal(self, number: int) -> Deal | None:
        """Return None: workers in no common round share no rows."""
        return None

    def submit(
        self, update: UpdateKey, session: str, *, now: float, is_refused: bool = False, rows: int = 0
    ) -> UpdateOutcome:
        """Take in an update whose delta has arrived whole. `close` must follow before the next one.

        Args:
            update: Its key.
            session: Session of the worker's process.
            now: Present time in seconds. The update is a sign of life.
            is_refused: Whether the delta must not count (see `guard`).
            rows: Not used.

        Returns:
            `accepted` exactly once for each key.

        Raises:
            WorkerRefused: The worker is not present (NOT_A_MEMBER), another process has its id (ID_TAKEN), or its base
                is unknown, or older than its last answer (WRONG_ROUND).
        """
        known = self.find(update, session)
        self._roster.hear(update.worker, session, now=now)
        if known is not None:
            return known
        self._submitted = (update, not is_refused)
        return UpdateOutcome(kind="accepted")

    def close(self) -> ClosedRound:
        """Close the round of a submitted update, after its outer step.

        Raises:
            UsageError: There is no update.
        """
        if self._submitted is None:
            raise UsageError(f"round {self._round}: has no update; close it after `submit`")
        update, counts = self._submitted
        closed = ClosedRound(
            round=self._round,
            counted=(update.worker,) if counts else (),
            refused=() if counts else (update.worker,),
            base_round=update.base_round,
        )
        self._round += 1
        self._answered[update.worker] = (update, UpdateAnswer(round=self._round, is_counted=counts))
        self._submitted = None
        return closed

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two updates, as values for JSON."""
        answered = {worker: {"update": asdict(u), "answer": asdict(a)} for worker, (u, a) in self._answered.items()}
        return {"round": self._round, "sessions": self._roster.state_dict(), "answered": answered}

    def load_state_dict(self, state: Mapping[str, Any], *, now: float) -> None:
        """Continue with a state that `state_dict` returned. Each worker has the heartbeat timeout to come back."""
        self._round, self._submitted = state["round"], None
        self._roster.load_state_dict(state["sessions"], now=now)
        self._answered = {
            worker: (UpdateKey(**entry["update"]), UpdateAnswer(**entry["answer"]))
            for worker, entry in state["answered"].items()
        }
