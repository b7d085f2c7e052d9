"""Each row is dealt to one worker of a round, and no round deals a row that another one had."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyward.errors import UsageError
from skyward.training.diloco.dealing import Deal, Hand
from skyward.training.diloco.rounds import Rounds, UpdateKey

NAMES = "abcde"


def take(rounds: Rounds, hand: Hand, worker: str) -> None:
    deal = rounds.deal(rounds.round)
    assert deal is not None
    hand.take(deal, worker)


def draw(hand: Hand, number: int) -> list[int]:
    return [hand.draw() for _ in range(number)]


def submit(rounds: Rounds, worker: str, rows: int, session: str = "") -> None:
    key = UpdateKey(worker=worker, base_round=rounds.round, number=rounds.round)
    rounds.submit(key, session or f"session of {worker}", now=0.0, rows=rows)


def rounds_of(*workers: str, num_workers: int | None = None) -> Rounds:
    rounds = Rounds(num_workers=len(workers) if num_workers is None else num_workers)
    for worker in workers:
        rounds.join(worker, f"session of {worker}", now=0.0)
    return rounds


def test_workers_that_stay_read_each_row_once() -> None:
    rounds, hands = rounds_of("a", "b", "c"), {name: Hand() for name in "abc"}
    drawn: list[int] = []
    for _ in range(4):
        for name, hand in hands.items():
            take(rounds, hand, name)
            drawn += draw(hand, 5)
            submit(rounds, name, hand.rows)
        rounds.close()
    assert sorted(drawn) == list(range(60))


def test_the_first_round_is_dealt_to_those_that_it_waits_for() -> None:
    rounds, early, late = rounds_of("a", num_workers=2), Hand(), Hand()
    take(rounds, early, "a")
    assert draw(early, 3) == [0, 2, 4]
    rounds.join("b", "session of b", now=0.0)
    take(rounds, late, "b")
    assert draw(late, 3) == [1, 3, 5]


def test_a_joiner_reads_on_where_the_others_are() -> None:
    rounds, hand = rounds_of("b"), Hand()
    take(rounds, hand, "b")
    draw(hand, 10)
    rounds.join("a", "session of a", now=0.0)
    submit(rounds, "b", hand.rows)
    rounds.close()
    assert rounds.deal(0) == Deal(members=("b",), shares=1, start=0)  # for an answer that comes late
    assert rounds.deal(1) == Deal(members=("a", "b"), shares=2, start=10)
    assert rounds.deal(2) is None


def test_a_replacement_in_a_round_that_waits_reads_the_rows_of_the_lost_worker() -> None:
    rounds = Rounds(min_workers=2)
    for worker in "ab":
        rounds.join(worker, f"session of {worker}", now=0.0)
    submit(rounds, "b", 7)
    rounds.evict("a")
    rounds.join("new", "session of new", now=0.0)
    assert rounds.deal(0) == Deal(members=("new", "b"), shares=2, start=0)
    rounds.join("a", "session of a", now=0.0, base_round=0)  # both may have read them now
    deal = rounds.deal(0)
    assert deal is not None
    assert deal.position("a", 0) == deal.position("new", 0)


def test_ranks_of_a_worker_read_different_rows() -> None:
    hands = [Hand(), Hand()]
    for rank, hand in enumerate(hands):
        hand.split(rank, 2)
        hand.take(Deal(members=("a", "b"), shares=2, start=10), "b")
    assert [draw(hand, 3) for hand in hands] == [[11, 15, 19], [13, 17, 21]]
    assert [hand.rows for hand in hands] == [6, 6]
    assert hands[0].workers == 4


def test_rows_that_are_read_until_the_answer_are_told_in_advance() -> None:
    hand = Hand()
    hand.take(Deal(members=("a",), shares=1, start=0), "a")
    draw(hand, 32)
    assert hand.rows_after(0, 4) == 32
    assert hand.rows_after(2, 4) == 48
    hand.take(Deal(members=("a",), shares=1, start=48), "a")
    assert hand.rows_after(2, 4) == 16  # by the rows of all steps so far
    assert hand.rows_after(2, 0) == 0


def test_a_hand_goes_on_from_its_state() -> None:
    hand, resumed = Hand(), Hand()
    assert draw(hand, 2) == [0, 1]  # no server yet
    hand.take(Deal(members=("a", "b"), shares=2, start=10), "b")
    draw(hand, 3)
    resumed.load_state_dict(json.loads(json.dumps(hand.state_dict())))
    assert draw(resumed, 2) == draw(hand, 2) == [17, 19]
    assert resumed.state_dict() == hand.state_dict()


def test_a_hand_without_a_deal_says_so() -> None:
    hand = Hand()
    hand.take(None, "a")
    with pytest.raises(UsageError, match="its server deals no rows, because it has async_mode=True"):
        hand.draw()


@dataclass
class Play:
    """Workers that come, read, and go in the rounds of one server."""

    rounds: Rounds
    joins: int = 0
    sessions: dict[str, str] = field(default_factory=dict)
    hands: dict[str, tuple[int, Hand]] = field(default_factory=dict)
    """Round of each worker, and its hand."""
    read: dict[str, list[int]] = field(default_factory=dict)
    """Rows that each worker has read in its round."""
    submitted: dict[str, list[int]] = field(default_factory=dict)
    counted: list[int] = field(default_factory=list)

    def play_turn(self, joins: str, lost: str, leaving: str, numbers: dict[str, int], is_restart: bool) -> None:
        for name in joins:
            if name not in self.rounds.workers:
                self.joins += 1
                self.sessions[name] = str(self.joins)
                self.hands.pop(name, None)
                self.rounds.join(name, self.sessions[name], now=0.0)
        if is_restart:
            self.rounds.load_state_dict(json.loads(json.dumps(self.rounds.state_dict())), now=0.0)
            self.submitted.clear()
        members = self.rounds.awaited
        for name in members:
            self.train(name, numbers[name])
        for name in lost:
            self.rounds.evict(name)
        for name in set(members) & set(self.rounds.awaited):
            submit(self.rounds, name, self.hands[name][1].rows, self.sessions[name])
            self.submitted[name] = self.read[name]
        for name in leaving:
            if name in self.rounds.workers:
                self.rounds.leave(name, self.sessions[name])
        if self.rounds.is_complete:
            self.rounds.close()
            self.counted += [row for rows in self.submitted.values() for row in rows]
            self.submitted.clear()

    def train(self, name: str, number: int) -> None:
        if name not in self.hands or self.hands[name][0] != self.rounds.round:
            self.hands[name], self.read[name] = (self.rounds.round, Hand()), []
            take(self.rounds, self.hands[name][1], name)
        self.read[name] += draw(self.hands[name][1], number)


names = st.text(NAMES, max_size=3)
turns = st.tuples(
    names, names, names, st.fixed_dictionaries({name: st.integers(0, 4) for name in NAMES}), st.booleans()
)


@given(num_workers=st.integers(1, 3), min_workers=st.integers(1, 3), turns=st.lists(turns, max_size=12))
def test_no_row_counts_twice_whoever_comes_and_goes(
    num_workers: int, min_workers: int, turns: list[tuple[str, str, str, dict[str, int], bool]]
) -> None:
    play = Play(Rounds(min_workers=min_workers, num_workers=max(num_workers, min_workers)))
    for turn in turns:
        play.play_turn(*turn)
    assert len(play.counted) == len(set(play.counted))
