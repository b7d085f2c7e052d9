"""Jobs that wait for others, for a time of the clock, or no longer than a time."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from skyward.errors import UsageError
from skyward.hub.model.cron import CronSchedule
from skyward.hub.model.jobs import AttemptEnd
from skyward.hub.model.refusal import Refusal
from tests.hub.services.hubs import ADA
from tests.hub.services.jobs.job_world import World, both

COMPLETED, FAILED = AttemptEnd.COMPLETED, AttemptEnd.FAILED


def finish(world: World, job: str, end: AttemptEnd) -> None:
    world.begin(job)
    world.end(job, end)
    world.pass_s(1)


@both
@pytest.mark.parametrize(
    ("rule", "ends", "states"),
    [
        ("success", (COMPLETED, COMPLETED), ("queued", "begins")),
        ("success", (COMPLETED, FAILED), ("queued", "cancelled")),
        ("success", (FAILED, COMPLETED), ("cancelled", "cancelled")),
        ("any", (FAILED, COMPLETED), ("queued", "begins")),
        ("any", (COMPLETED, FAILED), ("begins", "begins")),
        ("any", (FAILED, FAILED), ("queued", "cancelled")),
        ("all", (FAILED, COMPLETED), ("queued", "begins")),
    ],
)
def test_job_begins_after_others_as_its_rule_says(
    world: World, rule: str, ends: tuple[AttemptEnd, AttemptEnd], states: tuple[str, str]
) -> None:
    first, second = world.submit("first"), world.submit("second")
    third = world.submit("third", after=[first, second], after_is=rule)
    assert world.job(third).why == f"waits for 2 jobs: {first}, {second}"
    world.pass_s(1)
    assert world.state(third) == "queued"
    for job, end, state in zip((first, second), ends, states, strict=True):
        finish(world, job, end)
        found = world.state(third)
        assert ("begins" if found in ("reserved", "starting") else found) == state
    if state == "cancelled":
        assert world.job(third).why.startswith("after: job ")


def test_chain_falls_with_its_first_job_and_rises_by_a_retry(world: World) -> None:
    first = world.submit("first")
    second = world.submit("second", after=[first])
    third = world.submit("third", after=[second])
    world.do(world.hub.jobs.cancel(ADA, first))
    world.pass_s(1)
    world.pass_s(1)
    assert [world.state(job) for job in (first, second, third)] == ["cancelled"] * 3
    assert world.job(second).why == f"after: job {first} is cancelled"
    for job in (first, second, third):
        world.do(world.hub.jobs.retry(ADA, job))
    assert world.job(third).why == f"waits for job {second}"
    finish(world, first, COMPLETED)
    finish(world, second, COMPLETED)
    assert world.state(third) == "reserved"


def test_job_after_one_that_is_over_already_begins_and_a_deleted_one_counts_as_it_ended(world: World) -> None:
    first = world.submit("first")
    finish(world, first, COMPLETED)
    second = world.submit("second", after=[first])
    world.do(world.hub.jobs.delete(ADA, first))
    world.pass_s(1)
    assert world.state(second) == "reserved"
    with pytest.raises(Refusal, match="no such job in this project"):
        world.submit("third", after=[first])


@both
def test_job_that_waits_too_long_ends_and_one_that_runs_does_not(world: World) -> None:
    running = world.submit("running", nodes=4, max_wait_s=60.0)
    world.begin(running)
    waiting, held = world.submit("waiting", max_wait_s=60.0), world.submit("held", max_wait_s=60.0, is_held=True)
    world.pass_s(59)
    assert world.state(waiting) == "queued"
    world.pass_s(2)
    assert [world.state(job) for job in (running, waiting, held)] == ["running", "timed_out", "queued"]
    assert world.job(waiting).why.startswith("max_wait_s: it waited too long; waits for")
    world.do(world.hub.jobs.retry(ADA, waiting))
    world.pass_s(59)
    assert world.state(waiting) == "queued"
    world.pass_s(2)
    assert world.state(waiting) == "timed_out"


@both
def test_schedule_makes_a_job_at_each_time_unless_the_one_before_runs(world: World) -> None:
    world.now_s = datetime(2027, 1, 15, 2, 59, 30, tzinfo=UTC).timestamp()
    schedule = world.submit("nightly", cron="0 3 * * *", priority=0)
    assert world.job(schedule).why == "is a schedule: its next job is due at 2027-01-15 03:00 UTC"
    world.pass_s(1)
    assert jobs_of(world) == [("nightly", "queued")]
    world.pass_s(30)
    assert jobs_of(world) == [("nightly", "reserved"), ("nightly", "queued")]
    assert world.job(schedule).why.endswith("2027-01-16 03:00 UTC")
    made = newest(world)
    world.begin(made)
    world.now_s += 86_400
    world.beat(made)  # it is beyond its time, but not over
    world.pass_s(1)
    assert "was left out, because the one before is not over" in world.job(schedule).why
    world.end(made, AttemptEnd.STOPPED)
    world.pass_s(10 * 86_400)  # no hub ran meanwhile: the missed times count once
    assert [state for _, state in jobs_of(world)] == ["reserved", "timed_out", "queued"]
    world.do(world.hub.jobs.hold(ADA, schedule))
    world.do(world.hub.jobs.cancel(ADA, newest(world)))
    world.pass_s(86_400)
    assert len(jobs_of(world)) == 3
    world.do(world.hub.jobs.release(ADA, schedule))
    world.pass_s(86_400)
    assert len(jobs_of(world)) == 4
    world.do(world.hub.jobs.cancel(ADA, schedule))
    world.pass_s(10 * 86_400)
    assert len(jobs_of(world)) == 4


def jobs_of(world: World) -> list[tuple[str, str]]:
    page = world.do(world.hub.jobs.jobs(ADA, 10))
    return [(job.name, job.state.value) for job in page.items]


def newest(world: World) -> str:
    return str(world.do(world.hub.jobs.jobs(ADA, 1)).items[0].id)


def test_wrong_schedules_are_refused_in_words(world: World) -> None:
    with pytest.raises(Refusal, match="has 1 fields; write minute, hour"):
        world.submit(cron="daily")
    with pytest.raises(Refusal, match="a schedule waits for no job"):
        world.submit(cron="@daily", after=[world.submit()])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("* * * * *", "2026-11-26T12:31"),
        ("*/15 9-17 * * 1-5", "2026-11-26T12:45"),
        ("0 3 * * mon-fri", "2026-11-27T03:00"),
        ("30 12 * * *", "2026-11-27T12:30"),
        ("@daily", "2026-11-27T00:00"),
        ("0 0 29 2 *", "2028-02-29T00:00"),
        ("0 0 13 * fri", "2026-11-27T00:00"),  # either day is enough
        ("0 0 * jan,jul sun", "2027-01-03T00:00"),
        ("0 0 * * 7", "2026-11-29T00:00"),
    ],
)
def test_next_time_of_a_cron_expression(text: str, expected: str) -> None:
    moment = datetime(2026, 11, 26, 12, 30, 30, tzinfo=UTC)
    assert CronSchedule(text).after(moment).isoformat() == f"{expected}:00+00:00"


@pytest.mark.parametrize(
    "text", ["", "* * * *", "60 * * * *", "0 0 30 2 *", "*/0 * * * *", "5-1 * * * *", "0 0 * * mo", "*-5 * * * *", "a"]
)
def test_text_that_is_no_cron_expression_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cron="):
        CronSchedule(text)
