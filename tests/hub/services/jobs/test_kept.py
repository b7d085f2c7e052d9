"""Kept machines: a runner serves one job after another, waits for its time, and leaves when others need its nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyward.hub.model.capacity import MachineSetRecord
from skyward.hub.model.jobs import AttemptEnd
from skyward.hub.model.quotas import JobQuotaSpec
from skyward.hub.model.refusal import Refusal
from skyward.hub.services.jobs.attempts import NextOrder
from skyward.hub.services.jobs.launchers import SILENT_S
from skyward.hub.services.jobs.scheduler import FENCE_S
from tests.hub.services.hubs import ADA, ADMIN
from tests.hub.services.jobs.job_world import LOCAL, OWNER, World, both, pieces

COMPLETED = AttemptEnd.COMPLETED


def end(world: World, job: str, number: int = 1, end: AttemptEnd = COMPLETED, *, keeps: bool = True) -> None:
    if end is COMPLETED:
        world.do(world.hub.attempts.put_result(ADA, job, number, "value", pieces(b"42")))
    world.do(world.hub.attempts.end(ADA, job, number, end, keeps=keeps))


def ask(world: World, job: str, cost_usd: float = 0.0) -> NextOrder:
    return world.do(world.hub.attempts.next(ADA, job, 1, idle_cost_usd=cost_usd))


def give_back(world: World, job: str) -> None:
    world.do(world.hub.attempts.give_back(ADA, job, 1))


def local_set(world: World) -> MachineSetRecord:
    return world.do(world.hub.capacity.sets(OWNER))[0]


def run_kept(world: World, **options: object) -> str:
    """Bring a job to its end on machines that then wait."""
    job = world.submit(**{"keep_s": 60.0, **options})  # type: ignore[arg-type]
    world.begin(job)
    end(world, job)
    return job


@both
def test_runner_serves_one_job_after_the_other_and_ends_when_its_time_is_over(world: World) -> None:
    first = run_kept(world)
    assert world.job(first).attempts[0].kept_until == world.clock() + 60_000
    assert (local_set(world).used_nodes, local_set(world).kept_nodes) == (0, 1)
    assert ask(world, first) == NextOrder()
    second = world.submit(keep_s=60.0)
    world.pass_s(1)
    assert world.state(second) == "reserved"
    assert not world.poll().start  # no launcher starts another runner
    launch = ask(world, first, 0.25).launch
    assert launch is not None
    assert (launch.job, launch.attempt, launch.nodes, launch.keep_s) == (
        second,
        1,
        world.launches[first, 1].nodes,
        60.0,
    )
    assert ask(world, first).launch == launch  # the answer was lost
    world.beat(second)
    assert world.state(second) == "running"
    with pytest.raises(Refusal, match="is over, or has another runner"):
        world.beat(first)
    assert not world.poll().forget  # the process is the first attempt's
    assert local_set(world).kept_nodes == 0
    end(world, second)
    assert world.state(second) == "completed"
    world.pass_s(59)
    assert ask(world, first, 0.5) == NextOrder()
    assert local_set(world).kept_cost_usd == 0.5
    world.now_s += 1
    assert ask(world, first, 0.75).is_over
    give_back(world, first)
    assert local_set(world).kept_nodes == 0
    assert world.poll().forget == [(first, 1)]
    with pytest.raises(Refusal, match="is over, or has another runner"):
        ask(world, first)


@pytest.mark.parametrize(
    "other",
    [
        {"image": {"pip": ["numpy"]}},
        {"actor": ADMIN},
        {"secrets": ["TOKEN"]},
        {"command": ["true"]},
        {"budget_usd": 1.0},
    ],
)
def test_other_job_gets_free_nodes_first_and_kept_ones_when_it_must(world: World, other: dict[str, object]) -> None:
    first = run_kept(world)
    nodes = world.launches[first, 1].nodes
    small = world.submit(nodes=3, **other)  # type: ignore[arg-type]
    world.pass_s(1)
    (launch,) = world.poll().start
    assert set(launch.nodes).isdisjoint(nodes)
    large = world.submit(**other)  # type: ignore[arg-type]
    world.pass_s(1)
    assert world.state(large) == "reserved"
    assert not world.poll().start  # the runner has the node still
    assert ask(world, first).is_over
    world.pass_s(1)
    assert not world.poll().start
    give_back(world, first)
    world.pass_s(1)
    (launch,) = world.poll().start
    assert (launch.job, launch.nodes, world.state(small)) == (large, nodes, "starting")


def test_gang_finds_its_kept_nodes_among_free_ones(world: World) -> None:
    filler = world.submit("filler")
    world.begin(filler)
    first = run_kept(world, nodes=2)
    kept = world.launches[first, 1].nodes
    end(world, filler, keeps=False)
    second = world.submit(nodes=2)
    world.pass_s(1)
    launch = ask(world, first).launch
    assert launch is not None
    assert (launch.job, launch.nodes) == (second, kept)


@both
def test_dead_runner_holds_its_nodes_until_the_lease_of_its_machines_is_over(world: World) -> None:
    first = run_kept(world, nodes=4)
    world.poll(gone=((first, 1),))
    second = world.submit(nodes=4)
    world.pass_s(1)
    with pytest.raises(Refusal, match="is over"):
        ask(world, first)
    world.pass_s(LOCAL.lease_s - 1.5)
    assert not world.poll().start
    world.pass_s(1)
    world.pass_s(0)
    assert [launch.job for launch in world.poll().start] == [second]


def test_runner_that_dies_with_a_job_that_it_has_not_heard_of_costs_no_retry(world: World) -> None:
    first = run_kept(world, nodes=4)
    second = world.submit(nodes=4)
    world.pass_s(1)
    world.poll(gone=((first, 1),))
    assert world.state(second) == "queued"
    assert world.job(second).attempts[0].end == "withdrawn"
    world.pass_s(1)
    assert not world.poll(gone=((first, 1),)).start  # its next attempt waits for the nodes
    world.pass_s(LOCAL.lease_s)
    world.pass_s(1)
    assert [(launch.job, launch.attempt) for launch in world.poll().start] == [(second, 2)]


def test_runner_that_dies_with_its_second_job_loses_that_one(world: World) -> None:
    first = run_kept(world)
    second = world.submit()
    world.pass_s(1)
    assert ask(world, first).launch
    world.beat(second)
    world.poll(gone=((first, 1),))
    assert world.state(second) == "lost"
    world.pass_s(LOCAL.lease_s + 1)
    assert world.state(second) in ("queued", "reserved")
    assert not world.do(
        world.hub.database.read(lambda rows: rows.execute("SELECT 1 FROM attempt WHERE kept_until > 0").fetchone())
    )


def test_silent_runner_that_waits_is_killed_by_its_launcher_and_given_up_at_last(world: World) -> None:
    first = run_kept(world, keep_s=86_400.0)
    ask(world, first)
    world.pass_s(SILENT_S + 1)
    assert world.poll().kill == [(first, 1)]
    world.pass_s(FENCE_S)
    world.pass_s(LOCAL.lease_s + 1)
    assert local_set(world).kept_nodes == 0


def test_job_that_is_cancelled_before_its_runner_hears_of_it_leaves_the_machines(world: World) -> None:
    first = run_kept(world)
    second = world.submit()
    world.pass_s(1)
    world.do(world.hub.jobs.cancel(ADA, second))
    assert world.state(second) == "cancelled"
    assert ask(world, first).is_over
    give_back(world, first)


def test_drained_and_deleted_ones_give_their_machines_back(world: World) -> None:
    first, second = run_kept(world), run_kept(world, image={"pip": ["numpy"]})
    with pytest.raises(Refusal, match="its runner has machines that wait"):
        world.do(world.hub.jobs.delete(ADA, first))
    assert ask(world, first).is_over
    give_back(world, first)
    world.do(world.hub.jobs.delete(ADA, first))
    world.do(world.hub.capacity.drain(OWNER, "local", True))
    world.pass_s(1)
    assert ask(world, second).is_over


def test_machine_set_says_how_long_its_machines_wait_and_a_job_may_say_otherwise(world: World) -> None:
    world.do(world.hub.capacity.declare(OWNER, replace(LOCAL, keep_s=30.0)))
    kept, not_kept, dear = world.submit(), world.submit(keep_s=0.0), world.submit(budget_usd=5.0)
    world.pass_s(1)
    assert {launch.job: launch.keep_s for launch in world.poll().start} == {kept: 30.0, not_kept: 0.0, dear: 0.0}


def test_jobs_on_a_shared_node_keep_their_devices(world: World) -> None:
    world.do(world.hub.capacity.declare(OWNER, replace(LOCAL, nodes=1, devices=4, accelerator="H100")))
    first = world.submit(devices=2, keep_s=60.0)
    world.begin(first)
    end(world, first)
    other = world.submit(devices=2, image={"pip": ["numpy"]})
    world.begin(other)
    assert [world.launches[job, 1].devices for job in (first, other)] == [(0, 1), (2, 3)]
    second = world.submit(devices=2)
    world.pass_s(1)
    launch = ask(world, first).launch
    assert launch is not None
    assert (launch.job, launch.devices) == (second, (0, 1))
    end(world, second)
    third = world.submit(devices=1)
    world.pass_s(1)
    assert not world.poll().start
    assert ask(world, first).is_over
    give_back(world, first)
    world.pass_s(1)
    assert [(launch.job, launch.devices) for launch in world.poll().start] == [(third, (0,))]


@both
def test_cost_of_waiting_machines_counts_for_the_money_of_their_project(world: World) -> None:
    world.do(world.hub.quotas.set_job_quota(OWNER, "project", "default", JobQuotaSpec(usd_per_day=2.0)))
    first = run_kept(world)
    for cost_usd in (0.5, 0.5, 1.25):
        ask(world, first, cost_usd)
    world.do(world.hub.attempts.give_back(ADA, first, 1, idle_cost_usd=2.5))
    (quota,) = world.do(world.hub.quotas.job_quotas(OWNER))
    assert quota.today_usd == 2.5
    assert sum(day.cost_usd for day in world.do(world.hub.usage.days(OWNER))) == 2.5
    waiting = world.submit()
    world.pass_s(1)
    assert world.state(waiting) == "queued"
    assert "USD" in world.job(waiting).why
