"""Rounds close with all members present or gone, and each update counts exactly once."""

from __future__ import annotations

import json

import pytest

from skyward.errors import UsageError
from skyward.training.diloco.refusal import RefusalKind, WorkerRefused
from skyward.training.diloco.rounds import ClosedRound, Rounds, UpdateAnswer, UpdateKey, UpdateOutcome

ACCEPTED, REPEATED = UpdateOutcome(kind="accepted"), UpdateOutcome(kind="repeated")


def open_round(*workers: str, min_workers: int = 1, timeout_s: float = 120.0) -> Rounds:
    """Return rounds whose first round has these members."""
    rounds = Rounds(min_workers=min_workers, num_workers=len(workers), heartbeat_timeout_s=timeout_s)
    for worker in workers:
        rounds.join(worker, f"session of {worker}", now=0.0)
    assert rounds.awaited == tuple(sorted(workers))
    return rounds


def update(worker: str, base_round: int, number: int | None = None) -> UpdateKey:
    return UpdateKey(worker=worker, base_round=base_round, number=base_round if number is None else number)


def submit(
    rounds: Rounds,
    worker: str,
    base_round: int,
    number: int | None = None,
    *,
    now: float = 1.0,
    is_refused: bool = False,
) -> UpdateOutcome:
    key = update(worker, base_round, number)
    return rounds.submit(key, f"session of {worker}", now=now, is_refused=is_refused)


def refused(rounds: Rounds, worker: str, base_round: int, number: int | None = None) -> tuple[RefusalKind, str]:
    before = rounds.state_dict()
    with pytest.raises(WorkerRefused) as caught:
        submit(rounds, worker, base_round, number)
    assert rounds.state_dict() == before
    assert repr(worker) in caught.value.message
    return caught.value.kind, caught.value.message


def play(rounds: Rounds) -> ClosedRound:
    """Let all awaited workers submit, and close the round."""
    for worker in rounds.awaited:
        submit(rounds, worker, rounds.round)
    return rounds.close()


# The barrier ----------------------------------------------------------------------------------------------------------


def test_a_round_closes_when_all_its_members_have_submitted() -> None:
    rounds = open_round("b", "a")
    assert submit(rounds, "b", 0) == ACCEPTED
    assert not rounds.is_complete
    assert rounds.awaited == ("a",)
    with pytest.raises(UsageError, match="round 0: still waits for a;"):
        rounds.close()
    assert submit(rounds, "a", 0) == ACCEPTED
    assert rounds.is_complete
    assert rounds.close() == ClosedRound(round=0, counted=("a", "b"), refused=(), base_round=0)
    assert (rounds.round, rounds.awaited) == (1, ("a", "b"))


def test_a_lone_early_worker_does_not_pass_the_first_barrier() -> None:
    rounds = Rounds(num_workers=2)
    rounds.join("a", "session of a", now=0.0)
    submit(rounds, "a", 0)
    assert not rounds.is_complete
    with pytest.raises(UsageError, match="round 0: still waits for 1 more workers"):
        rounds.close()
    rounds.join("b", "session of b", now=100.0)
    assert rounds.awaited == ("b",)
    submit(rounds, "b", 0)
    assert rounds.close().counted == ("a", "b")


def test_num_workers_is_a_matter_of_the_first_round_only() -> None:
    rounds = open_round("a", "b", "c")
    play(rounds)
    rounds.evict("b")
    rounds.evict("c")
    assert play(rounds) == ClosedRound(round=1, counted=("a",), refused=(), base_round=1)


def test_a_late_joiner_begins_with_the_next_round() -> None:
    rounds = open_round("a", "b")
    submit(rounds, "a", 0)
    rounds.join("c", "session of c", now=1.0)
    assert refused(rounds, "c", 0)[0] is RefusalKind.NOT_IN_ROUND
    assert play(rounds).counted == ("a", "b")
    assert rounds.awaited == ("a", "b", "c")


def test_a_refused_delta_does_not_hold_up_the_others() -> None:
    rounds = open_round("a", "b", min_workers=2)
    submit(rounds, "a", 0, is_refused=True)
    submit(rounds, "b", 0)
    assert rounds.close() == ClosedRound(round=0, counted=("b",), refused=("a",), base_round=0)
    assert submit(rounds, "a", 0).answer == UpdateAnswer(round=1, is_counted=False)


# Members that go ------------------------------------------------------------------------------------------------------


def test_a_dead_member_releases_the_barrier() -> None:
    rounds = open_round("a", "b", timeout_s=10.0)
    submit(rounds, "a", 0, now=5.0)
    assert rounds.evict_silent(now=9.9) == ()
    assert rounds.evict_silent(now=10.0) == ("b",)
    assert rounds.close().counted == ("a",)


def leave(rounds: Rounds, worker: str, *, has_ended: bool) -> None:
    rounds.leave(worker, f"session of {worker}", has_ended=has_ended)


def test_a_round_is_over_when_the_others_have_ended_their_training() -> None:
    rounds = open_round("a", "b", min_workers=2)
    leave(rounds, "a", has_ended=True)
    assert not rounds.is_over  # b trains
    submit(rounds, "b", 0)
    assert rounds.is_over
    assert not rounds.is_complete
    restored = Rounds(min_workers=2)
    restored.load_state_dict(json.loads(json.dumps(rounds.state_dict())), now=0.0)
    submit(restored, "b", 0)
    assert restored.is_over
    restored.join("new", "session of new", now=0.0)
    assert restored.awaited == ("new",)
    leave(restored, "new", has_ended=False)
    assert not restored.is_over  # who joins may have others joining with it


def test_a_round_waits_for_a_member_that_was_lost() -> None:
    rounds = open_round("a", "b", "c", min_workers=2)
    leave(rounds, "a", has_ended=True)
    rounds.evict("b")
    submit(rounds, "c", 0)
    assert not rounds.is_over
    rounds.join("b", "session of b", now=0.0, base_round=0)
    leave(rounds, "b", has_ended=True)
    assert rounds.is_over


def test_a_round_does_not_wait_for_a_worker_that_was_lost_before_it_began() -> None:
    rounds = open_round("a", "b", "c", min_workers=2)
    rounds.evict("c")
    play(rounds)
    leave(rounds, "a", has_ended=True)
    submit(rounds, "b", 1)
    assert rounds.is_over


def test_the_first_round_waits_for_its_workers_whoever_has_ended() -> None:
    rounds = Rounds(num_workers=3)
    for worker in ("a", "b"):
        rounds.join(worker, f"session of {worker}", now=0.0)
    leave(rounds, "a", has_ended=True)
    submit(rounds, "b", 0)
    assert not rounds.is_over


def test_heartbeats_keep_a_slow_member() -> None:
    rounds = open_round("a", timeout_s=10.0)
    for now in (9.0, 18.0, 27.0):
        rounds.hear("a", "session of a", now=now)
        assert rounds.evict_silent(now=now + 9) == ()
    rounds.hear("a", "session of a", now=1.0)  # out of order
    assert rounds.evict_silent(now=36.0) == ()


def test_nobody_is_evicted_without_a_timeout() -> None:
    assert open_round("a", timeout_s=0.0).evict_silent(now=1e9) == ()


def test_an_evicted_worker_is_told_so() -> None:
    rounds = open_round("a", "b")
    rounds.evict("a")
    with pytest.raises(WorkerRefused, match="worker='a': is not present") as caught:
        rounds.hear("a", "session of a", now=1.0)
    assert caught.value.kind is RefusalKind.NOT_A_MEMBER
    assert refused(rounds, "a", 0)[0] is RefusalKind.NOT_A_MEMBER


def test_a_member_that_leaves_releases_the_barrier_and_keeps_its_update() -> None:
    rounds = open_round("a", "b", "c")
    submit(rounds, "a", 0)
    rounds.leave("a", "session of a")
    rounds.leave("b", "session of b")
    submit(rounds, "c", 0)
    assert rounds.close().counted == ("a", "c")
    assert rounds.awaited == ("c",)


def test_a_round_with_too_few_members_waits_for_another_worker() -> None:
    rounds = open_round("a", "b", min_workers=2)
    play(rounds)
    submit(rounds, "a", 1)
    rounds.evict("b")
    assert not rounds.is_complete
    rounds.join("c", "session of c", now=2.0)
    assert rounds.awaited == ("c",)  # at once, because nothing else would end the round
    submit(rounds, "c", 1)
    assert rounds.close().counted == ("a", "c")


def test_a_waiting_worker_fills_a_round_that_has_become_short() -> None:
    rounds = open_round("a", "b", min_workers=2)
    rounds.join("d", "session of d", now=1.0)
    rounds.join("c", "session of c", now=2.0)
    rounds.evict("b")
    assert rounds.awaited == ("a", "d")


def test_a_round_may_open_without_enough_members() -> None:
    rounds = open_round("a", "b", min_workers=2)
    submit(rounds, "a", 0)
    rounds.leave("a", "session of a")
    submit(rounds, "b", 0)
    rounds.leave("b", "session of b")
    assert rounds.close().counted == ("a", "b")
    assert not rounds.is_complete
    rounds.join("c", "session of c", now=3.0)
    rounds.join("d", "session of d", now=3.0)
    assert play(rounds).counted == ("c", "d")


# Workers that come back -----------------------------------------------------------------------------------------------


def test_a_worker_that_comes_back_in_time_sends_its_delta_for_its_base_round() -> None:
    rounds = open_round("a", "b")
    rounds.evict("a")
    rounds.join("a", "session of a", now=9.0, base_round=0)
    assert rounds.awaited == ("a", "b")
    assert play(rounds).counted == ("a", "b")


def test_a_replacement_goes_on_from_the_checkpoint_of_an_evicted_worker() -> None:
    rounds = open_round("a", "b")
    rounds.evict("a")
    rounds.join("a", "another session", now=9.0, base_round=0)
    assert rounds.submit(update("a", 0), "another session", now=9.0) == ACCEPTED


def test_a_worker_that_comes_back_without_its_parameters_waits() -> None:
    rounds = open_round("a", "b")
    rounds.evict("a")
    rounds.join("a", "session of a", now=9.0)
    assert rounds.awaited == ("b",)


def test_a_worker_that_slept_for_two_rounds_loads_the_current_parameters() -> None:
    rounds = open_round("a", "b")
    rounds.evict("a")
    play(rounds)
    play(rounds)
    rounds.join("a", "session of a", now=9.0, base_round=0)
    kind, message = refused(rounds, "a", 0)
    assert kind is RefusalKind.WRONG_ROUND
    assert message == "base_round=0 of worker 'a': round 2 is open; load its parameters and train from there"
    play(rounds)
    assert rounds.awaited == ("a", "b")


def test_a_worker_ahead_of_a_restored_server_loads_the_older_parameters() -> None:
    assert refused(open_round("a"), "a", 3)[0] is RefusalKind.WRONG_ROUND


def test_two_workers_with_one_id_are_not_one() -> None:
    rounds = open_round("a", "b")
    for call in (rounds.join, rounds.hear):
        with pytest.raises(WorkerRefused, match="worker='a': another process trains under this id") as caught:
            call("a", "another session", now=1.0)
        assert caught.value.kind is RefusalKind.ID_TAKEN
    with pytest.raises(WorkerRefused):
        rounds.leave("a", "another session")
    with pytest.raises(WorkerRefused):
        rounds.submit(update("a", 0), "another session", now=1.0)
    assert rounds.awaited == ("a", "b")
    rounds.join("a", "session of a", now=1.0)  # the first one may say it again


# Exactly once ---------------------------------------------------------------------------------------------------------


def test_an_update_that_comes_again_gets_the_stored_answer() -> None:
    rounds = open_round("a", "b")
    assert rounds.find(update("a", 0), "session of a") is None
    assert submit(rounds, "a", 0) == ACCEPTED
    assert submit(rounds, "a", 0) == REPEATED == rounds.find(update("a", 0), "session of a")
    play(rounds)
    answered = UpdateOutcome(kind="answered", answer=UpdateAnswer(round=1, is_counted=True))
    assert submit(rounds, "a", 0) == answered == rounds.find(update("a", 0), "session of a")
    assert rounds.awaited == ("a", "b")


def test_an_answer_is_kept_for_a_worker_that_was_evicted() -> None:
    rounds = open_round("a", "b")
    submit(rounds, "a", 0)
    rounds.evict("a")
    for _ in range(3):
        play(rounds)
    rounds.join("a", "session of a", now=9.0, base_round=0)
    assert submit(rounds, "a", 0).answer == UpdateAnswer(round=1, is_counted=True)


def test_a_second_update_for_one_round_is_refused() -> None:
    rounds = open_round("a", "b")
    submit(rounds, "a", 0, number=7)
    assert refused(rounds, "a", 0, number=8)[0] is RefusalKind.CONFLICT
    play(rounds)
    assert refused(rounds, "a", 0, number=8)[0] is RefusalKind.WRONG_ROUND


# A server that is killed ----------------------------------------------------------------------------------------------


def restored(rounds: Rounds, *, now: float) -> Rounds:
    other = Rounds(min_workers=2, heartbeat_timeout_s=10.0)
    other.load_state_dict(json.loads(json.dumps(rounds.state_dict())), now=now)
    return other


def test_a_restored_server_awaits_the_updates_of_its_open_round_again() -> None:
    rounds = open_round("a", "b", "c", min_workers=2, timeout_s=10.0)
    play(rounds)
    submit(rounds, "a", 1)
    submit(rounds, "c", 1)
    rounds.leave("c", "session of c")
    rounds = restored(rounds, now=1000.0)
    assert (rounds.round, rounds.awaited) == (1, ("a", "b"))
    assert submit(rounds, "a", 0).answer == UpdateAnswer(round=1, is_counted=True)
    rounds.join("c", "session of c", now=1001.0, base_round=1)
    assert [submit(rounds, worker, 1, now=1001.0) for worker in "abc"] == [ACCEPTED] * 3
    assert rounds.close().counted == ("a", "b", "c")


def test_members_of_a_restored_server_have_the_timeout_to_come_back() -> None:
    rounds = restored(open_round("a", "b", timeout_s=10.0), now=1000.0)
    assert rounds.evict_silent(now=1009.0) == ()
    assert rounds.evict_silent(now=1010.0) == ("a", "b")


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="min_workers=0"):
        Rounds(min_workers=0)
    with pytest.raises(UsageError, match="num_workers=1: must be a whole number >= 2"):
        Rounds(min_workers=2, num_workers=1)
    with pytest.raises(UsageError, match="heartbeat_timeout_s=-1"):
        Rounds(heartbeat_timeout_s=-1)
