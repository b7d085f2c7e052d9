"""Dealing of rows: which rows each worker reads in each round, without a word between workers.

The rows of all epochs form one endless line of positions. A round has the positions from its start on, and its members
take turns: with K shares, the member of share k reads start + k, start + k + K, and so on. The next round starts behind
the last of them. So no position is read twice, whoever joins or leaves between two rounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from ...errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """Positions of a round.

    Example:
        >>> deal = Deal(members=("a", "b"), shares=2, start=100)
        >>> [deal.position("b", number) for number in range(3)]
        [101, 103, 105]
    """

    members: tuple[str, ...]
    """Workers of the round, in the order of their shares."""
    shares: int
    """Number of shares, >= 1. In a round that waits for workers, some have no member yet."""
    start: int
    """First position."""

    def position(self, worker: str, number: int) -> int:
        """Return the position that a worker reads after `number` others."""
        # A worker that came back after its share was given away has a number above the shares.
        share = self.members.index(worker) if worker in self.members else len(self.members)
        return self.start + share % self.shares + self.shares * number

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """Return the deal that `dataclasses.asdict` has turned into values for JSON."""
        return cls(members=tuple(state["members"]), shares=state["shares"], start=state["start"])


class Dealer:
    """Deals of a server: that of the open round, and those of the last ones.

    Args:
        shares: Least number of shares in the first round.
    """

    def __init__(self, shares: int) -> None:
        self._deal = Deal(members=(), shares=shares, start=0)
        self._rows = 0
        """Most rows that a worker reads in the open round."""
        self._past: dict[int, Deal] = {}

    def seat(self, worker: str, gone: Collection[str]) -> None:
        """Give a member a share, if it has none: that of a member that is gone, or else the next one."""
        members = list(self._deal.members)
        if worker in members:
            return
        free = next((number for number, member in enumerate(members) if member in gone), len(members))
        members[free : free + 1] = [worker]
        self._deal = Deal(members=tuple(members), shares=self._deal.shares, start=self._deal.start)

    def read(self, rows: int) -> None:
        """Note how many rows a worker reads in the open round."""
        self._rows = max(self._rows, rows)

    def open_round(self, number: int, members: Iterable[str], *, least: int, kept: int) -> None:
        """Deal for the next round, and keep the deals of some before it.

        Args:
            number: Number of the round.
            members: Its members.
            least: Least number of shares.
            kept: Number of former deals to keep, >= 0.
        """
        former = self._deal
        self._past[number - 1] = former
        for past in [past for past in self._past if past < number - kept]:
            del self._past[past]
        present = tuple(sorted(members))
        start = former.start + former.shares * self._rows
        self._deal, self._rows = Deal(members=present, shares=max(least, len(present)), start=start), 0

    def deal_of(self, number: int, *, open_round: int) -> Deal | None:
        """Return the deal of a round, or None if it is not kept."""
        return self._deal if number == open_round else self._past.get(number)

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the beginning of the open round, as values for JSON."""
        return {"deal": asdict(self._deal), "past": {str(number): asdict(deal) for number, deal in self._past.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a state that `state_dict` returned."""
        self._deal, self._rows = Deal.from_json(state["deal"]), 0
        self._past = {int(number): Deal.from_json(deal) for number, deal in state["past"].items()}


@dataclass(slots=True)
class _Dealt:
    deal: Deal | None
    worker: str = ""
    drawn: int = 0


class Hand:
    """Positions that a process reads, one after another. One thread draws, and another may take a deal.

    Before its worker has joined a server, a process reads all positions.

    Example:
        >>> hand = Hand()
        >>> hand.take(Deal(members=("a", "b"), shares=2, start=100), "b")
        >>> [hand.draw() for _ in range(3)]
        [101, 103, 105]
        >>> hand.rows
        3
    """

    def __init__(self) -> None:
        self._dealt = _Dealt(None)  # replaced at once, so that no draw mixes two deals
        self._has_joined = False
        self._drawn_before = 0
        self._part, self._parts = 0, 1

    def split(self, part: int, parts: int) -> None:
        """Read only a part of the worker's positions, because its other ranks read the others."""
        self._part, self._parts = part, parts

    @property
    def workers(self) -> int:
        """Number of processes that share the rows."""
        return self._parts * (1 if self._dealt.deal is None else self._dealt.deal.shares)

    @property
    def rows(self) -> int:
        """Number of rows that the worker has read in this round, with those of its other ranks."""
        return self._dealt.drawn * self._parts

    def rows_after(self, steps: int, steps_before: int) -> int:
        """Return the rows of this round after some more steps, by those of the steps before."""
        drawn = (self._drawn_before + self._dealt.drawn) * self._parts
        return self.rows + (math.ceil(drawn * steps / steps_before) if steps_before else 0)

    def take(self, deal: Deal | None, worker: str) -> None:
        """Read the share of a worker from now on. None: the server deals no rows, and `draw` will say so."""
        self._has_joined = True
        if deal is None or deal != self._dealt.deal:
            self._drawn_before += self._dealt.drawn
            self._dealt = _Dealt(deal, worker)

    def draw(self) -> int:
        """Return the next position.

        Raises:
            UsageError: The server deals no rows.
        """
        dealt = self._dealt
        if dealt.deal is None and self._has_joined:
            raise UsageError(
                "DiLoCoSampler: its server deals no rows, because it has async_mode=True or an older skyward; "
                "use `sky.shard`, or another sampler"
            )
        number = dealt.drawn * self._parts + self._part
        dealt.drawn += 1
        return number if dealt.deal is None else dealt.deal.position(dealt.worker, number)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as values for JSON."""
        deal = self._dealt.deal
        return {
            "deal": None if deal is None else asdict(deal),
            "worker": self._dealt.worker,
            "drawn": self._dealt.drawn,
            "drawn_before": self._drawn_before,
            "has_joined": self._has_joined,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position that `state_dict` returned."""
        deal = None if state["deal"] is None else Deal.from_json(state["deal"])
        self._dealt = _Dealt(deal, state["worker"], state["drawn"])
        self._drawn_before, self._has_joined = state["drawn_before"], state["has_joined"]
