"""Jobs that are trials of a sweep, and their driver, which is a job without machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from skyward.hub.model.access import Actor
from skyward.hub.model.jobs import PROTOCOL, AttemptEnd, JobRecord, JobState
from skyward.hub.model.quotas import JobQuotaSpec
from skyward.hub.model.refusal import Refusal
from tests.hub.services.hubs import ADA
from tests.hub.services.jobs.job_world import LOCAL, OWNER, SPEC, World, both

CONFIG: dict[str, Any] = {
    "search_space": {"x": {"type": "uniform", "min": 0, "max": 1}},
    "strategy": "random",
    "objective": {"metric": "loss", "direction": "minimize"},
    "max_trials": 4,
    "seed": 1,
}


def submit_driver(world: World, **trials: object) -> str:
    """Submit a sweep whose trials are jobs, and bring its driver to its run."""
    sweep = world.do(world.hub.hpo.start(ADA, "digits", "key", CONFIG)).sweep.id
    driver = world.submit("digits", nodes=0, sweep=sweep, trials=asdict(replace(SPEC, **trials)))  # type: ignore[arg-type]
    world.begin(driver)
    return driver


def start(world: World, driver: str, number: int = 0, attempt: int = 1, actor: Actor = ADA) -> JobRecord:
    record: JobRecord = world.do(world.hub.trial_jobs.start(actor, driver, attempt, number, {"params": {"x": 0.5}}))
    return record


@both
def test_driver_has_no_machines_and_its_trials_are_jobs_of_its_request(world: World) -> None:
    busy = [world.submit() for _ in range(LOCAL.nodes)]
    world.pass_s(1)
    driver = submit_driver(world, is_preemptible=True)
    assert world.job(driver).attempts[0].nodes == ()
    trial = start(world, driver)
    assert (trial.name, trial.spec.is_preemptible, trial.user) == ("digits-0", True, ADA.user)
    assert trial.spec.trial == {"sweep": 1, "number": 0, "task": {"params": {"x": 0.5}}}
    assert start(world, driver).id == trial.id, "the same trial has the same job"
    world.pass_s(1)
    assert world.state(trial.id) == "queued"
    world.end(busy[0], AttemptEnd.COMPLETED)
    world.pass_s(1)
    assert world.state(trial.id) == "reserved"
    other = start(world, driver, 1)
    page = world.do(world.hub.jobs.jobs(ADA, 10, sweep=1))
    assert [record.id for record in page.items] == [other.id, trial.id]
    page = world.do(world.hub.jobs.jobs(ADA, 10, states=[JobState.QUEUED], sweep=1))
    assert [record.id for record in page.items] == [other.id]
    world.begin(trial.id)
    world.beat(trial.id, saved_at=world.clock())
    page = world.do(world.hub.jobs.jobs(ADA, 10, sweep=1))
    assert [record.saved_at for record in page.items] == [None, world.clock()]
    assert world.job(trial.id).saved_at == world.clock()
    page = world.do(world.hub.jobs.jobs(ADA, 10, with_trials=False))
    assert [record.id for record in page.items] == [driver, *reversed(busy)]
    assert world.do(world.hub.trial_jobs.unfinished(ADA, driver, 1)) == [trial.id, other.id]


@both
def test_trials_outlive_the_driver_that_is_lost_and_end_with_the_one_that_is_cancelled(world: World) -> None:
    driver = submit_driver(world, nodes=LOCAL.nodes)
    trials = [start(world, driver, number).id for number in range(2)]
    world.begin(trials[0])
    world.poll(gone=((driver, 1),))
    world.pass_s(0.1)
    assert world.state(driver) == "queued", "nothing has to be waited for"
    with pytest.raises(Refusal, match="attempt=1: is over"):
        start(world, driver, 2)
    world.pass_s(1.1)
    world.begin(driver, 2)
    assert [start(world, driver, number, 2).id for number in range(2)] == trials
    world.do(world.hub.jobs.cancel(ADA, driver))
    with pytest.raises(Refusal, match="is being ended"):
        start(world, driver, 2, 2)
    assert (world.state(trials[1]), world.beat(trials[0])) == ("cancelled", "abort")
    world.end(driver, AttemptEnd.STOPPED, 2)
    world.do(world.hub.jobs.retry(ADA, driver))
    world.begin(driver, 3)
    assert [start(world, driver, number, 3).id for number in range(2)] == trials
    assert world.state(trials[1]) == "queued"
    world.end(trials[0], AttemptEnd.STOPPED)
    assert world.state(trials[0]) == "queued", "its cancel was withdrawn"


def test_trials_are_cancelled_when_their_driver_fails(world: World) -> None:
    driver = submit_driver(world)
    trial = start(world, driver).id
    world.end(driver, AttemptEnd.FAILED, error="UsageError: no")
    assert (world.state(driver), world.state(trial)) == ("failed", "cancelled")


@both
def test_sweep_over_jobs_waits_for_a_launcher_that_knows_it_and_holds_no_machines_meanwhile(world: World) -> None:
    older = PROTOCOL - 1
    sweep = world.do(world.hub.hpo.start(ADA, "digits", "key", CONFIG)).sweep.id
    driver = world.submit("digits", nodes=0, sweep=sweep, trials=asdict(replace(SPEC, nodes=LOCAL.nodes)))
    world.pass_s(1)
    assert not world.poll("old", protocol=older).start
    assert world.job(driver).why == (
        "waits for a newer launcher: old of machines 'local' is too old for a sweep whose trials are jobs;"
        " upgrade skyward there and start it again, or run `skyward capacity drain local`"
    )
    world.pass_s(400)
    assert world.state(driver) == "reserved", "it waits where a newer launcher finds it at once"
    world.begin(driver)
    trial = start(world, driver).id
    world.pass_s(1)
    assert not world.poll(protocol=older).start
    other = world.submit()
    world.pass_s(11)
    assert (world.state(trial), world.state(other)) == ("queued", "reserved")
    assert world.job(trial).why.startswith("waits for a newer launcher: here of machines 'local'")
    assert [launch.job for launch in world.poll(protocol=older).start] == [other]
    world.end(other, AttemptEnd.COMPLETED)
    world.pass_s(61)
    assert [launch.job for launch in world.poll().start] == [trial]


def test_sweep_over_jobs_goes_to_the_machines_whose_launcher_knows_it(world: World) -> None:
    older, known = PROTOCOL - 1, dict[str, list[tuple[str, int]]]()
    world.do(world.hub.capacity.declare(OWNER, replace(LOCAL, name="other", usd_per_hour=1.0)))

    def poll(launcher: str, machines: str, protocol: int) -> list[str]:
        world.pass_s(1)
        own = known.setdefault(launcher, [])
        poll = world.hub.launchers.poll(OWNER, launcher, machines=[machines], known=own, protocol=protocol)
        started = world.do(poll).start
        own += [(launch.job, launch.attempt) for launch in started]
        return [launch.job for launch in started]

    sweep = world.do(world.hub.hpo.start(ADA, "digits", "key", CONFIG)).sweep.id
    driver = world.submit("digits", nodes=0, sweep=sweep, trials=asdict(SPEC))
    assert poll("old", "local", older) == []
    assert poll("new", "other", PROTOCOL) == [driver], "it is placed again at once"
    world.beat(driver)
    trial, other = start(world, driver).id, world.submit()
    assert poll("old", "local", older) == [other]
    assert poll("new", "other", PROTOCOL) == [trial], "nobody had to find out again"
    world.pass_s(10)
    last = start(world, driver, 1).id
    assert poll("newer", "local", PROTOCOL) == []
    assert poll("new", "other", PROTOCOL) == [last]
    another = world.submit()
    assert poll("newer", "local", PROTOCOL) == [another]
    world.pass_s(1)
    final = start(world, driver, 2).id
    assert poll("newer", "local", PROTOCOL) == [final], "its launcher has shown that it is new"


def test_driver_counts_for_no_quota_of_jobs(world: World) -> None:
    world.do(world.hub.quotas.set_job_quota(OWNER, "project", "default", JobQuotaSpec(jobs=1)))
    driver = submit_driver(world)
    trials = [start(world, driver, number).id for number in range(2)]
    world.pass_s(1)
    assert [world.state(trial) for trial in trials] == ["reserved", "queued"]


def test_token_of_a_driver_is_for_jobs_of_its_trials_only(world: World) -> None:
    other = world.submit(is_held=True)
    sweep = world.do(world.hub.hpo.start(ADA, "digits", "key", CONFIG)).sweep.id
    driver = world.submit("digits", nodes=0, sweep=sweep, trials=asdict(SPEC))
    world.pass_s(1)
    launches = world.do(world.hub.launchers.poll(replace(OWNER, token="of the launcher"), "here")).start
    token = replace(ADA, token=launches[0].token.split("_")[1])
    trial = start(world, driver, actor=token).id
    with pytest.raises(Refusal, match="attempt=1: is over, or has another runner"):
        start(world, driver, 1)
    jobs = world.hub.jobs
    acts: tuple[Callable[[], object], ...] = (
        lambda: world.do(jobs.cancel(token, other)),
        lambda: world.do(jobs.retry(token, driver)),
        lambda: world.do(jobs.delete(token, other)),
        lambda: world.submit(actor=token),
    )
    for act in acts:
        with pytest.raises(Refusal, match="is of a sweep's driver"):
            act()
    world.do(jobs.cancel(token, trial))
    assert world.state(trial) == "cancelled"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"nodes": 0}, "nodes: 0 is for the driver"),
        ({"trials": asdict(SPEC)}, "trials: needs a sweep"),
        ({"trial": {"sweep": 1}}, "trial: is set by the driver"),
        ({"nodes": 0, "sweep": 1, "trials": {**asdict(SPEC), "nodes": 0}}, "trials: is no request of one call"),
        ({"nodes": 0, "sweep": 1, "trials": {**asdict(SPEC), "sweep": 1}}, "trials: names a sweep"),
        (
            {"nodes": 0, "sweep": 1, "trials": {**asdict(SPEC), "notify": [{"url": "https://x.y"}]}},
            "trials: is no request",
        ),
        ({"nodes": 0, "sweep": 1, "trials": {**asdict(SPEC), "secrets": ["a b"]}}, "secrets: an entry"),
    ],
)
def test_wrong_drivers_are_refused_in_words(world: World, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(Refusal, match=problem):
        world.submit(**changes)
