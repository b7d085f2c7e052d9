"""Synchronous rounds: a barrier over members that are frozen with each round, and updates that count exactly once.

    join ──> waiting ──(a round opens)──> awaited ──(submit)──> submitted ──(the round closes)──> awaited ...
                                             │ leave, evict
                                             v
                                          missing ──(join with this round as its base)──> awaited

Round r starts from the parameters after r outer steps, and closes with outer step r + 1. With streaming fragments each
synchronisation of a fragment is a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...errors import UsageError
from ..evaluation.legal import check_at_least
from .dealing import Deal, Dealer
from .membership import RosterOfRounds
from .refusal import RefusalKind, WorkerRefused


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateKey:
    """Name of an update. A worker that sends a delta again sends it with the same key."""

    worker: str
    base_round: int
    """Round whose parameters the delta is relative to, >= 0."""
    number: int
    """Number of the worker's update, counted by the worker and kept in its checkpoint, >= 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateAnswer:
    """Answer to an update whose round is closed."""

    round: int
    """Round in which the worker goes on: the one after its base round."""
    is_counted: bool
    """Whether the delta is in the mean; False if it was refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateOutcome:
    """State of an update that the server knows."""

    kind: Literal["accepted", "repeated", "answered"]
    """`accepted`: the update is new, and its delta must be added to the mean, unless it was refused. `repeated`: the
    update is known, and its round is open; discard the delta. `answered`: its round is closed; discard the delta."""
    answer: UpdateAnswer | None = None
    """The stored answer, if the round is closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedRound:
    """A round that has ended."""

    round: int
    counted: tuple[str, ...]
    """Workers whose deltas are in the mean, in the order of their ids. Without one there is no outer step."""
    refused: tuple[str, ...]
    """Workers whose deltas were refused, in the order of their ids."""
    base_round: int
    """Round whose parameters the deltas are relative to. It is the closed one, unless rounds are asynchronous."""


class Rounds(RosterOfRounds):
    """State machine of synchronous rounds, without threads or a clock of its own.

    When a round opens, its members are the workers that are present, and a worker that joins later waits for the next
    round. A round with fewer than `min_workers` members is short: it takes in workers, waiting ones first, until it has
    enough. The first round does so until it has `num_workers`. A round is complete when no member is awaited, and at
    least `min_workers` have submitted. A member that leaves or is evicted is no longer awaited. An update that
    it has submitted stays in the round.

    A round with too few workers waits for more. It is *over* instead, and its workers need not wait, once a worker has
    left at the end of its training, and no member that was lost may come back. A worker that joins opens it again.

    An update counts once. Its key is known from `submit` on, and its answer is kept until the worker's next one. So a
    worker that lost an answer sends the same update again, and gets that answer. With N fragments, the last N answers
    are kept. So a worker may be resumed from a checkpoint that is a whole cycle old, and repeat its steps.

    Each round deals the rows of the data set to its members (see `dealing`). A worker says with its update how many it
    reads in the round.

    A refused delta counts as submitted, so a broken worker does not hold up the others.

    Args:
        min_workers: Least number of workers that end a round, >= 1.
        num_workers: Number of workers that the first round waits for, >= `min_workers`; None: `min_workers`. Members
            that die afterwards hold up nothing.
        heartbeat_timeout_s: Seconds of silence after which a worker is evicted; 0: never.

    Example:
        >>> rounds = Rounds(min_workers=2)
        >>> for worker in ("a", "b"):
        ...     rounds.join(worker, f"process of {worker}", now=0.0)
        >>> rounds.submit(UpdateKey(worker="a", base_round=0, number=0), "process of a", now=9.0).kind
        'accepted'
        >>> rounds.is_complete
        False
        >>> rounds.submit(UpdateKey(worker="b", base_round=0, number=0), "process of b", now=9.5).kind
        'accepted'
        >>> rounds.close()
        ClosedRound(round=0, counted=('a', 'b'), refused=(), base_round=0)
    """

    def __init__(
        self, *, min_workers: int = 1, num_workers: int | None = None, heartbeat_timeout_s: float = 120.0
    ) -> None:
        check_at_least("min_workers", min_workers, 1)
        check_at_least("num_workers", min_workers if num_workers is None else num_workers, min_workers)
        super().__init__(heartbeat_timeout_s=heartbeat_timeout_s)
        self._min_workers = min_workers
        self._needed = num_workers or min_workers
        """Number of members below which the round takes in workers, and cannot close."""
        self._dealer = Dealer(self._needed)
        self._round = 0
        self._awaited: set[str] = set()
        self._submitted: dict[str, tuple[UpdateKey, bool]] = {}
        """Update of each worker in this round, and whether it counts."""
        self._missing: set[str] = set()
        """Members of this round that were removed before they submitted."""
        self._answered: dict[str, dict[UpdateKey, UpdateAnswer]] = {}
        """Last updates of each worker whose rounds are closed. They stay when the worker goes: it may come back."""
        self._kept_answers = 1
        self._is_ending = False
        """Whether a worker has left at the end of its training since the last one joined."""
        self._lost: dict[str, str] = {}
        """Sessions of workers that are gone, and have not ended their training. They may come back."""

    def keep_answers(self, number: int) -> None:
        """Keep that many answers for each worker, from the next round on."""
        self._kept_answers = number

    @property
    def round(self) -> int:
        """Number of the open round."""
        return self._round

    @property
    def awaited(self) -> tuple[str, ...]:
        """Members of this round that have not submitted, in the order of their ids. They train from its parameters."""
        return tuple(sorted(self._awaited))

    def deal(self, number: int) -> Deal | None:
        """Return the deal of a round; None if it is over for too long."""
        return self._dealer.deal_of(number, open_round=self._round)

    @property
    def is_complete(self) -> bool:
        """Readiness to close: no member is awaited, and enough workers have submitted."""
        return not self._awaited and len(self._submitted) >= self._needed

    @property
    def is_over(self) -> bool:
        """End without completion: too few workers are left for the round, and nobody is expected."""
        is_short = not self._awaited and len(self._submitted) < self._min_workers == self._needed
        return is_short and self._is_ending and not self._missing & self._lost.keys()

    # Presence --------------------------------------------------------------------------------------------------------

    def join(self, worker: str, session: str, *, now: float, base_round: int | None = None) -> None:
        """Add a worker, or one that comes back.

        It begins to train once it is among the `awaited`: at once, or when the next round opens.

        Args:
            worker: Its id.
            session: Random text of its process, the same after it is resumed from a checkpoint.
            now: Present time in seconds.
            base_round: Round whose parameters it has; None if it has none. If it is the open round, and the worker was
                its member, the worker is awaited again, and goes on with its inner steps or its delta. With any other
                round it has to load the current parameters.

        Raises:
            WorkerRefused: Another process has this id (ID_TAKEN).
        """
        is_new = worker not in self._roster.workers
        self._roster.join(worker, session, now=now)
        if is_new and self._lost.pop(worker, None) != session:
            self._is_ending = False  # a worker that begins has others beginning with it
        if base_round == self._round and worker in self._missing:
            self._await(worker)
        self._fill()

    def takes_base(self, worker: str, base_round: int) -> bool:
        """Return whether an update of a present worker may have this base."""
        return base_round == self._round and worker in self._awaited

    def leave(self, worker: str, session: str, *, has_ended: bool = False) -> None:
        super().leave(worker, session)
        if has_ended:
            self._is_ending = True
            del self._lost[worker]

    def evict(self, worker: str) -> None:
        session = self._roster.remove(worker)
        if session is not None:
            self._lost[worker] = session
        if worker in self._awaited:
            self._awaited.remove(worker)
            self._missing.add(worker)
            self._fill()

    # Updates ---------------------------------------------------------------------------------------------------------

    def find(self, update: UpdateKey, session: str) -> UpdateOutcome | None:
        """Return the state of a known update; None if `submit` would accept it. Nothing changes.

        So a server can answer before the delta has travelled again.

        Raises:
            WorkerRefused: As `submit`.
        """
        worker = update.worker
        self._roster.check(worker, session)
        answer = self._answered.get(worker, {}).get(update)
        if answer is not None:
            return UpdateOutcome(kind="answered", answer=answer)
        if update.base_round != self._round:
            problem = f"base_round={update.base_round} of worker {worker!r}: round {self._round} is open"
            raise WorkerRefused(RefusalKind.WRONG_ROUND, f"{problem}; load its parameters and train from there")
        if worker in self._submitted:
            if self._submitted[worker][0] == update:
                return UpdateOutcome(kind="repeated")
            problem = f"number={update.number} of worker {worker!r}: it has sent another update for this round"
            raise WorkerRefused(RefusalKind.CONFLICT, f"{problem}; wait for the next round, and load its parameters")
        if worker not in self._awaited:
            problem = f"worker={worker!r}: is not a member of round {self._round}"
            raise WorkerRefused(RefusalKind.NOT_IN_ROUND, f"{problem}; wait for the next round")
        return None

    def submit(
        self, update: UpdateKey, session: str, *, now: float, is_refused: bool = False, rows: int = 0
    ) -> UpdateOutcome:
        """Take in an update whose delta has arrived whole.

        Args:
            update: Its key.
            session: Session of the worker's process.
            now: Present time in seconds. The update is a sign of life.
            is_refused: Whether the delta must not count (see `guard`). The worker is no longer awaited either way.
            rows: Number of rows that the worker reads in this round, also until the answer, >= 0.

        Returns:
            `accepted` exactly once for each key. Only then does the delta belong into the mean.

        Raises:
            WorkerRefused: The worker is not present (NOT_A_MEMBER), another process has its id (ID_TAKEN), the worker
                is not in this round (NOT_IN_ROUND), its base is another round (WRONG_ROUND), or it has sent another
                update in this round (CONFLICT).
        """
        known = self.find(update, session)
        self._roster.hear(update.worker, session, now=now)
        if known is not None:
            return known
        self._awaited.remove(update.worker)
        self._submitted[update.worker] = (update, not is_refused)
        self._dealer.read(rows)
        return UpdateOutcome(kind="accepted")

    def close(self) -> ClosedRound:
        """Close a complete round, after its outer step, and open the next one with all workers that are present.

        Raises:
            UsageError: The round is not complete.
        """
        if not self.is_complete:
            waits = ", ".join(self.awaited) or f"{self._needed - len(self._submitted)} more workers"
            raise UsageError(f"round {self._round}: still waits for {waits}; close it when it is complete")
        closed = ClosedRound(
            round=self._round,
            counted=tuple(sorted(worker for worker, (_, counts) in self._submitted.items() if counts)),
            refused=tuple(sorted(worker for worker, (_, counts) in self._submitted.items() if not counts)),
            base_round=self._round,
        )
        self._round += 1
        for worker, (update, counts) in self._submitted.items():
            answered = self._answered.setdefault(worker, {})
            answered[update] = UpdateAnswer(round=self._round, is_counted=counts)
            while len(answered) > self._kept_answers:
                del answered[next(iter(answered))]
        self._submitted, self._missing = {}, set()
        self._awaited = set(self._roster.workers)
        self._dealer.open_round(self._round, self._awaited, least=self._needed, kept=self._kept_answers)
        return closed

    # State -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the beginning of the open round, as values for JSON.

        Updates that this round has received are not part of it, because the sum of their deltas is lost with the
        server. Their workers got no answer, so they send them again.
        """
        answered = {
            worker: [{"update": asdict(update), "answer": asdict(answer)} for update, answer in entries.items()]
            for worker, entries in self._answered.items()
        }
        return {
            "round": self._round,
            "needed": self._needed,
            "sessions": self._roster.state_dict(),
            "members": sorted(self._awaited | (self._submitted.keys() & set(self._roster.workers))),
            "missing": sorted(self._missing | (self._submitted.keys() - set(self._roster.workers))),
            "answered": answered,
            "is_ending": self._is_ending,
            "lost": dict(self._lost),
            "dealer": self._dealer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, now: float) -> None:
        """Continue with a state that `state_dict` returned. Each member has the heartbeat timeout to come back."""
        self._round, self._needed = state["round"], state["needed"]
        self._roster.load_state_dict(state["sessions"], now=now)
        self._awaited, self._missing, self._submitted = set(state["members"]), set(state["missing"]), {}
        self._answered = {
            worker: {UpdateKey(**entry["update"]): UpdateAnswer(**entry["answer"]) for entry in entries}
            for worker, entries in state["answered"].items()
        }
        self._is_ending, self._lost = state.get("is_ending", False), dict(state.get("lost", {}))
        if "dealer" in state:
            self._dealer.load_state_dict(state["dealer"])
        else:  # a save of an older version
            self._dealer.open_round(self._round, self._awaited, least=self._needed, kept=0)
        self._fill()

    # Internals -------------------------------------------------------------------------------------------------------

    def _await(self, worker: str) -> None:
        self._awaited.add(worker)
        self._missing.discard(worker)
        self._dealer.seat(worker, self._missing)

    def _fill(self) -> None:
        """Take workers into a short round, in the order in which they joined."""
        for worker in self._roster.workers:
            if len(self._awaited) + len(self._submitted) >= self._needed:
                break
            if worker not in self._submitted:
                self._await(worker)
        if len(self._awaited) + len(self._submitted) >= self._needed:
            self._needed = self._min_workers  # the first round has begun
