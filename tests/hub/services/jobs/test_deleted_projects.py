"""Jobs of a project that is deleted while they run, and messages of another version."""

from __future__ import annotations

import pytest

from skyward.hub.model.access import Actor, Role
from skyward.hub.model.jobs import PROTOCOL, AttemptEnd
from skyward.hub.model.refusal import Refusal
from tests.hub.services.hubs import ADA, add_project
from tests.hub.services.jobs.job_world import OWNER, World, both


@both
def test_jobs_of_a_deleted_project_are_cancelled_and_hold_their_machines_until_the_lease_is_over(world: World) -> None:
    brief = Actor(user="ada", organization=1, project=add_project(world.hub.database, "brief"), role=Role.RESEARCHER)
    running, waiting = world.submit(actor=brief, nodes=4), world.submit(actor=brief)
    world.pass_s(0.1)
    (launch,) = world.poll().start
    world.do(world.hub.attempts.beat(brief, running, 1, is_running=True, cost_usd=0.0))
    world.do(world.hub.people.delete_project(OWNER, "brief"))
    other = world.submit(nodes=4)
    world.pass_s(1)
    assert world.state(other) == "queued"
    world.poll(gone=((launch.job, launch.attempt),))  # its token is refused, so it ended
    world.pass_s(1)
    assert world.state(other) == "queued"
    world.pass_s(5)
    world.pass_s(0.1)
    assert world.state(other) == "reserved"
    for job in (running, waiting):
        assert world.do(world.hub.jobs.job(brief, job)).state.value == "cancelled"


def test_runner_of_the_version_before_is_heard_and_one_of_a_later_version_is_told_what_to_do(world: World) -> None:
    job = world.submit()
    world.pass_s(0.1)
    world.poll()
    order = world.do(world.hub.attempts.beat(ADA, job, 1, is_running=True, cost_usd=0.0, protocol=PROTOCOL - 1))
    assert order.now == world.clock()
    assert world.state(job) == "running"
    with pytest.raises(Refusal, match="protocol=4: this hub speaks versions 2 and 3; upgrade the hub's skyward"):
        world.do(world.hub.attempts.beat(ADA, job, 1, is_running=True, cost_usd=0.0, protocol=PROTOCOL + 1))
    with pytest.raises(Refusal, match="protocol=1: .*; upgrade skyward where the launcher runs"):
        world.do(world.hub.launchers.poll(OWNER, "old", protocol=PROTOCOL - 2))
    world.end(job, AttemptEnd.COMPLETED)
    assert world.state(job) == "completed"
