"""The life of a job as one table, and what the end of an attempt leads to."""

from __future__ import annotations

from itertools import product

import pytest

from skyward.hub.model.jobs import (
    LONGEST_PAUSE_S,
    START_RETRIES,
    TRANSITIONS,
    AttemptEnd,
    FailureCounts,
    JobState,
    after_attempt,
    pause_s,
)
from skyward.hub.store.jobs import JobRow

WITH_ATTEMPT = {state for state in JobState if state.has_attempt}
FINAL = {JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT}


def test_every_state_is_in_the_table_and_every_one_but_the_first_follows_another() -> None:
    assert set(TRANSITIONS) == set(JobState)
    assert set().union(*TRANSITIONS.values()) == set(JobState)


def test_final_states_lead_only_back_to_the_queue_and_all_others_lead_to_the_end() -> None:
    assert {state for state in JobState if state.is_final} == FINAL
    for state in FINAL:
        assert TRANSITIONS[state] <= {JobState.QUEUED}
    for state in set(JobState) - FINAL:
        assert reachable(state) >= FINAL, state


def test_machines_are_held_between_reservation_and_end_and_never_twice() -> None:
    assert {state for state in JobState if JobState.RESERVED in TRANSITIONS[state]} == {JobState.QUEUED}
    for state in WITH_ATTEMPT:
        assert not TRANSITIONS[state] & {JobState.RESERVED}
        assert JobState.QUEUED in TRANSITIONS[state]
    assert WITH_ATTEMPT.isdisjoint(FINAL | {JobState.QUEUED})


@pytest.mark.parametrize(("before", "after"), list(product(JobState, JobState)))
def test_row_changes_as_the_table_says_and_not_otherwise(before: JobState, after: JobState) -> None:
    row = JobRow(project=1, id="j", key=None, name="n", type="other", owner="ada", spec="{}", created_at=0)
    row.state = before
    if after in TRANSITIONS[before]:
        row.enter(after, 5)
        assert (row.state, row.ended_at) == (after, 5 if after.is_final else None)
    else:
        with pytest.raises(ValueError, match="cannot go from"):
            row.enter(after, 5)
        assert row.state == before


@pytest.mark.parametrize("retries", [0, 2])
def test_each_kind_of_failure_spends_its_own_budget(retries: int) -> None:
    def tries(end: AttemptEnd) -> int:
        """Return the attempts until the job has failed, 100 at most."""
        failures, count = FailureCounts(), 0
        while count < 100:
            count += 1
            after = after_attempt(end, failures, retries=retries, ends_as=None)
            failures = after.failures
            if after.state is JobState.FAILED:
                break
        return count

    assert tries(AttemptEnd.FAILED) == retries + 1
    assert tries(AttemptEnd.START_FAILED) == START_RETRIES + 1
    for endless in (AttemptEnd.LOST, AttemptEnd.STOPPED, AttemptEnd.NO_CAPACITY, AttemptEnd.WITHDRAWN):
        assert tries(endless) == 100


@pytest.mark.parametrize("end", AttemptEnd)
def test_job_that_was_told_to_end_ends_so_unless_it_was_faster(end: AttemptEnd) -> None:
    after = after_attempt(end, FailureCounts(), retries=9, ends_as=JobState.TIMED_OUT)
    assert after.state is (JobState.COMPLETED if end is AttemptEnd.COMPLETED else JobState.TIMED_OUT)


def test_pauses_grow_with_losses_and_not_with_preemptions() -> None:
    counts = [FailureCounts(lost=count) for count in range(12)]
    lost = [after_attempt(AttemptEnd.LOST, earlier, retries=0, ends_as=None).pause_s for earlier in counts]
    assert lost[:4] == [1.0, 2.0, 4.0, 8.0]
    assert lost[-1] == pause_s(10**6) == LONGEST_PAUSE_S
    assert after_attempt(AttemptEnd.STOPPED, FailureCounts(lost=5), retries=0, ends_as=None).pause_s == 0.0


def reachable(state: JobState) -> set[JobState]:
    found, waiting = set[JobState](), {state}
    while waiting:
        found |= waiting
        waiting = set().union(*(TRANSITIONS[one] for one in waiting)) - found
    return found
