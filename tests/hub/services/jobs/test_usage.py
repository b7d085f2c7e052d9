"""The queue, the history of jobs, and what jobs used, over the real database and scheduler by the test's clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from skyward.hub.http.figures import Figures
from skyward.hub.model.access import Role
from skyward.hub.model.capacity import MachineSetSpec
from skyward.hub.model.jobs import AttemptEnd, JobPriority
from skyward.hub.model.queue import QueuePlan, SetPlan
from skyward.hub.services.jobs.usage import months_of
from tests.hub.services.hubs import ADA, VIEWER, add_project
from tests.hub.services.jobs.job_world import OWNER, World, both

HOUR_S = 3600.0
LAB = MachineSetSpec(name="lab", provider={"type": "local"}, nodes=2, devices=4, accelerator="A100", usd_per_hour=8.0)
A100: dict[str, Any] = {"accelerator": "A100", "max_duration_s": HOUR_S}


@pytest.fixture
def lab(world: World) -> World:
    world.do(world.hub.capacity.declare(OWNER, LAB))
    return world


def plan_of(world: World, project: int = 1) -> QueuePlan:
    plan: QueuePlan = world.do(world.hub.queue.plan(replace(VIEWER, project=project)))
    return plan


def on(plan: QueuePlan, name: str = "lab") -> SetPlan:
    return next(one for one in plan.sets if one.spec.name == name)


@both
def test_queue_has_the_order_of_the_scheduler_and_the_devices_that_it_has_promised(lab: World) -> None:
    running = lab.submit("running", devices=4, **A100)
    lab.begin(running)
    gang = lab.submit("gang", nodes=2, devices=4, **A100)
    late = lab.submit("late", nodes=2, devices=1, priority=JobPriority.LOW, **A100)
    lab.submit("held", is_held=True)
    lab.pass_s(2)
    plan = plan_of(lab)
    assert [job.record.name for job in plan.jobs] == ["running", "gang", "late", "held"]
    assert [job.place for job in plan.jobs] == [None, 1, 2, None]
    assert (plan.waiting, plan.has_more) == (2, False)
    assert plan.jobs[1].needs == "8 A100 on 2 nodes"
    spans = {span.state: span for span in on(plan).spans}
    assert (spans["running"].job, spans["running"].devices, spans["running"].each) == (running, (0, 1, 2, 3), 4)
    assert (spans["reservation"].job, spans["reservation"].nodes) == (gang, (0, 1))
    assert spans["reservation"].begins_at == plan.jobs[1].starts_by == spans["running"].ends_by
    assert late == plan.jobs[2].record.id


def test_another_project_sees_that_devices_are_taken_and_not_by_whom(lab: World) -> None:
    other = add_project(lab.hub.database, "other")
    lab.begin(lab.submit("secret", devices=4, **A100))
    lab.submit("secret gang", nodes=2, devices=4, **A100)
    lab.pass_s(2)
    plan = plan_of(lab, other)
    assert plan.jobs == []
    assert {(span.job, span.name, span.each) for span in on(plan).spans} == {("", "", 4)}
    assert "secret" not in repr([span for one in plan.sets for span in one.spans])


def test_job_that_waits_for_others_to_leave_has_its_devices_from_their_end_on(lab: World) -> None:
    low = lab.submit("low", devices=None, nodes=2, priority=JobPriority.LOW, is_preemptible=True, **A100)
    lab.begin(low)
    high = lab.submit("high", devices=4, **A100)
    lab.pass_s(2)
    assert (lab.state(low), lab.state(high)) == ("preempting", "reserved")
    spans = {span.job: span for span in on(plan_of(lab)).spans}
    assert spans[high].begins_at == spans[low].ends_by
    (record,) = [one for one in lab.do(lab.hub.capacity.sets(VIEWER)) if one.spec.name == "lab"]
    assert (record.used_nodes, record.used_devices, record.idle_nodes) == (2, 8, 0)


@both
def test_history_of_a_job_has_its_saves_moves_and_prices(lab: World) -> None:
    job = lab.submit("train", devices=2, **A100)
    lab.begin(job)
    saved_at = lab.clock()
    lab.do(lab.hub.attempts.beat(ADA, job, 1, is_running=True, cost_usd=0.0, saved_at=saved_at))
    lab.beat(job)  # a beat that says the same checkpoint again, or none, is no save
    lab.end(job, AttemptEnd.LOST, error="node: is gone")
    lab.pass_s(2)
    lab.begin(job, 2)
    history = lab.do(lab.hub.histories.history(VIEWER, job))
    assert [(event.kind, event.attempt) for event in history.events] == [
        ("create", 0),
        *(("reserved", 1), ("starting", 1), ("running", 1), ("saved", 1), ("queued", 1)),
        *(("reserved", 2), ("starting", 2), ("running", 2)),
    ]
    first, second = history.attempts
    assert (first.saved_at, first.ends_by, first.devices, first.usd_per_hour) == (saved_at, None, (0, 1), 8.0)
    assert second.ends_by is not None
    assert HOUR_S * 1000 - 100 < second.ends_by - lab.clock() <= HOUR_S * 1000
    assert (history.needs, history.result_sizes) == ("2 A100", {})


@both
def test_use_is_counted_by_day_and_stays_when_the_job_is_deleted(lab: World) -> None:
    lab.now_s = 20_000 * 86_400.0 - HOUR_S  # an hour before midnight
    job = lab.submit("train", devices=3, **{**A100, "max_duration_s": 3 * HOUR_S})
    lab.begin(job)
    lab.now_s += 2 * HOUR_S
    running = lab.do(lab.hub.usage.days(VIEWER))
    assert [(use.day, use.attempts) for use in running] == [(19_999, 0), (20_000, 0)]
    lab.do(lab.hub.attempts.beat(ADA, job, 1, is_running=True, cost_usd=6.0))
    lab.end(job, AttemptEnd.COMPLETED)
    lab.do(lab.hub.jobs.delete(ADA, job))
    days = lab.do(lab.hub.usage.days(VIEWER))
    assert [(use.project, use.day, use.kind, use.attempts) for use in days] == [
        ("default", 19_999, "A100", 0),
        ("default", 20_000, "A100", 1),
    ]
    assert sum(use.seconds for use in days) == pytest.approx(3 * 2 * HOUR_S, rel=0.01)
    assert [use.cost_usd for use in days] == pytest.approx([3.0, 3.0], rel=0.01)
    (month,) = months_of(days)
    assert month.month == "2024-10"
    assert month.cost_usd == pytest.approx(6.0)


def test_owners_see_the_use_of_all_projects_and_others_that_of_their_own(lab: World) -> None:
    other = add_project(lab.hub.database, "other")
    lab.begin(lab.submit("train", devices=1, **A100))
    lab.now_s += 60
    assert lab.do(lab.hub.usage.days(replace(VIEWER, project=other))) == []
    owner = replace(OWNER, project=other)
    assert owner.role is Role.OWNER
    assert {use.project for use in lab.do(lab.hub.usage.days(owner))} == {"default"}


def test_prometheus_reads_ended_running_and_waiting_jobs_and_devices(lab: World) -> None:
    done = lab.submit("done", devices=1, **A100)
    lab.begin(done)
    lab.now_s += 120
    lab.end(done, AttemptEnd.COMPLETED)
    never = lab.submit("never", is_held=True)
    lab.do(lab.hub.jobs.cancel(ADA, never))
    lab.begin(lab.submit("running", devices=3, **A100))
    lab.submit("waiting", devices=1, is_held=True, priority=JobPriority.LOW, **A100)
    text = Figures().text(lab.do(lab.hub.usage.counts())).decode()
    found = {
        (sample.name.removeprefix("skyward_hub_"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    org, other = ("org", "default"), ("type", "other")
    assert found["jobs_total", org, ("status", "completed"), other] == 1
    assert found["jobs_total", org, ("status", "cancelled"), other] == 1
    assert found["gpu_hours_total", ("gpu_type", "A100"), org] == pytest.approx(120 / 3600, rel=0.01)
    assert found["job_duration_seconds_count", other] == 1  # one never began
    assert found["job_duration_seconds_bucket", ("le", "60.0"), other] == 0
    assert found["job_duration_seconds_bucket", ("le", "300.0"), other] == 1
    assert found["job_duration_seconds_sum", other] == pytest.approx(120, rel=0.01)
    assert found["jobs_running", org, other] == 1
    assert found["queue_depth", org, ("priority", "low")] == 1
    assert found["gpus_allocated", ("gpu_type", "A100")] == 3
    assert found["gpus_available", ("gpu_type", "A100")] == 5
