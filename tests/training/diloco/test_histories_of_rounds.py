"""Histories of workers, messages and deaths, drawn by hypothesis: no update counts twice, none is lost, none blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from skyward.training.diloco.refusal import RefusalKind, WorkerRefused
from skyward.training.diloco.rounds import Rounds, UpdateKey

TIMEOUT_S = 10.0
T = TypeVar("T")
ids = st.sampled_from("abcd")


@dataclass
class Worker:
    """A worker's process: what it knows, which may be out of date."""

    name: str
    session: int = 0
    base_round: int | None = None
    number: int = 0

    @property
    def key(self) -> UpdateKey:
        assert self.base_round is not None
        return UpdateKey(worker=self.name, base_round=self.base_round, number=self.number)


def attempt(call: Callable[[], T]) -> tuple[RefusalKind | None, T | None]:
    """Return the kind of the refusal, or the result."""
    try:
        return None, call()
    except WorkerRefused as refusal:
        return refusal.kind, None


class Histories(RuleBasedStateMachine):
    """A server's rounds, four workers, and a model of what must have counted."""

    @initialize(
        min_workers=st.integers(1, 3), more=st.integers(0, 1), num_fragments=st.integers(1, 3), present=st.sets(ids)
    )
    def begin(self, min_workers: int, more: int, num_fragments: int, present: set[str]) -> None:
        self.now, self.needed, self.min_workers = 0.0, min_workers + more, min_workers
        self.rounds = Rounds(min_workers=min_workers, num_workers=self.needed, heartbeat_timeout_s=TIMEOUT_S)
        self.num_fragments = num_fragments
        self.rounds.keep_answers(num_fragments)
        self.saved, self.saved_needed = self.rounds.state_dict(), self.needed
        self.workers = {name: Worker(name) for name in "abcd"}
        self.frozen: set[str] = set()
        """Members of the round when it opened."""
        self.removed: set[str] = set()
        """Workers that were removed since."""
        self.has_ended = False
        """Whether a worker has ever ended its training."""
        self.received: dict[UpdateKey, bool] = {}
        """Updates that the open round has accepted, and whether they count."""
        self.closed: dict[UpdateKey, bool] = {}
        self.last_closed: dict[str, list[UpdateKey]] = {name: [] for name in "abcd"}
        """Last updates of each worker whose rounds are closed, one for each fragment."""
        for name in sorted(present):
            self.join(name)

    # Workers

    @rule(name=ids)
    def join(self, name: str) -> None:
        worker = self.workers[name]
        kind, _ = attempt(
            lambda: self.rounds.join(name, str(worker.session), now=self.now, base_round=worker.base_round)
        )
        assert kind in (None, RefusalKind.ID_TAKEN)
        if len(self.rounds.awaited) + len(self.received) >= self.needed:
            self.needed = self.min_workers
        if kind is None and name in self.rounds.awaited:
            worker.base_round = self.rounds.round  # loads the parameters, if it has others

    @rule(name=ids)
    def load(self, name: str) -> None:
        if name in self.rounds.awaited:
            self.workers[name].base_round = self.rounds.round

    @rule(names=st.sets(ids, min_size=1))
    def train(self, names: set[str]) -> None:
        """Some of the awaited workers finish their inner steps, and send new updates."""
        for name in sorted(names & set(self.rounds.awaited)):
            self.load(name)
            self.workers[name].number += 1
            self.submit(name, is_refused=False, is_answer_lost=False)
        if self.rounds.is_complete:
            self.close()

    @rule(name=ids)
    def repeat_inner_steps(self, name: str) -> None:
        """A worker forgets that it has sent its update, and will send another one."""
        self.workers[name].number += 1

    @rule(name=ids, back=st.integers(1, 3))
    def resume_from_checkpoint(self, name: str, back: int) -> None:
        """A worker goes back to one of its last updates, and will send it again."""
        kept = self.last_closed[name]
        if back <= len(kept):
            self.workers[name].base_round, self.workers[name].number = kept[-back].base_round, kept[-back].number

    @rule(name=ids, is_refused=st.booleans(), is_answer_lost=st.booleans())
    def submit(self, name: str, is_refused: bool, is_answer_lost: bool) -> None:
        worker = self.workers[name]
        if worker.base_round is None:
            return
        key, before = worker.key, self.rounds.state_dict()
        kind, outcome = attempt(
            lambda: self.rounds.submit(key, str(worker.session), now=self.now, is_refused=is_refused)
        )
        if outcome is None:
            assert self.rounds.state_dict() == before
            assert key not in self.received or kind in (RefusalKind.NOT_A_MEMBER, RefusalKind.ID_TAKEN)
            if kind is RefusalKind.WRONG_ROUND:
                assert key not in self.last_closed[name]
                worker.base_round = None
        elif outcome.kind == "accepted":
            assert key not in self.received
            assert key not in self.closed
            assert key.base_round == self.rounds.round
            self.received[key] = not is_refused
        elif outcome.kind == "repeated":
            assert key in self.received
        else:
            assert outcome.answer is not None
            assert outcome.answer.round == key.base_round + 1
            assert outcome.answer.is_counted == self.closed[key]
            if not is_answer_lost:
                worker.base_round, worker.number = outcome.answer.round, worker.number + 1

    @rule(name=ids)
    def heartbeat(self, name: str) -> None:
        kind, _ = attempt(lambda: self.rounds.hear(name, str(self.workers[name].session), now=self.now))
        assert (kind is RefusalKind.NOT_A_MEMBER) == (name not in self.rounds.workers)

    @rule(name=ids)
    def evict(self, name: str) -> None:
        if name in self.rounds.workers:
            self.rounds.evict(name)
            self.removed.add(name)

    @rule(name=ids, has_ended=st.booleans())
    def leave(self, name: str, has_ended: bool) -> None:
        kind, _ = attempt(lambda: self.rounds.leave(name, str(self.workers[name].session), has_ended=has_ended))
        if kind is None:
            self.removed.add(name)
            self.has_ended = self.has_ended or has_ended

    @rule(name=ids)
    def lose_all_state(self, name: str) -> None:
        """A new process begins under the same id, with no checkpoint."""
        self.workers[name] = Worker(name, session=self.workers[name].session + 1)

    # The server

    @rule(seconds=st.floats(0.0, 8.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.removed.update(self.rounds.evict_silent(now=self.now))

    @precondition(lambda self: self.rounds.is_complete)
    @rule()
    def close(self) -> None:
        closed = self.rounds.close()
        assert {key.base_round for key in self.received} == {closed.round}
        assert list(closed.counted) == sorted(key.worker for key, counts in self.received.items() if counts)
        assert list(closed.refused) == sorted(key.worker for key, counts in self.received.items() if not counts)
        assert len(self.received) >= self.needed
        assert self.frozen <= {key.worker for key in self.received} | self.removed
        assert not self.rounds.is_complete
        self.closed |= self.received
        for key in self.received:
            self.last_closed[key.worker] = [*self.last_closed[key.worker], key][-self.num_fragments :]
        self.received, self.removed = {}, set()
        self.frozen = set(self.rounds.awaited)
        assert self.frozen == set(self.rounds.workers)
        self.saved, self.saved_needed = self.rounds.state_dict(), self.needed

    @rule(is_shutdown=st.booleans())
    def restart_server(self, is_shutdown: bool) -> None:
        """The server goes on from its last round, or from what it saved as it shut down. Its open sums are lost."""
        state = self.rounds.state_dict() if is_shutdown else self.saved
        self.rounds = Rounds(min_workers=self.min_workers, heartbeat_timeout_s=TIMEOUT_S)
        self.rounds.keep_answers(self.num_fragments)
        self.rounds.load_state_dict(json.loads(json.dumps(state)), now=self.now)
        self.received = {}
        self.needed = self.needed if is_shutdown else self.saved_needed

    # Promises

    @invariant()
    def members_are_present_and_some_way_leads_on(self) -> None:
        awaited, present = set(self.rounds.awaited), set(self.rounds.workers)
        assert awaited <= present
        assert not awaited & {key.worker for key in self.received}
        if not awaited and not self.rounds.is_complete:  # then there are too few workers
            assert len(present | {key.worker for key in self.received}) < self.needed

    @invariant()
    def no_round_is_over_while_it_may_be_completed(self) -> None:
        if self.rounds.is_over:
            assert self.has_ended
            assert not self.rounds.is_complete
            assert not self.rounds.awaited

    def teardown(self) -> None:
        """From any state, workers that come back and train finish rounds."""
        if not hasattr(self, "rounds"):
            return
        self.wait(2 * TIMEOUT_S)
        for _ in range(3):
            for name in self.workers:
                self.join(name)
            number = self.rounds.round
            self.train(set(self.workers))
            assert self.rounds.round == number + 1


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=100, stateful_step_count=30)
