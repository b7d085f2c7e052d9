"""Load of the GPUs of jobs, as sampled events."""

from __future__ import annotations

import json
from typing import Any

from skyward.hub.services.jobs.gpu_use import KEPT
from skyward.hub.store import journal
from tests.hub.services.hubs import ADA
from tests.hub.services.jobs.job_world import World, both

SAMPLE = {"node": 0, "gpu": 3, "busy": 0.5, "memory_used_gib": 20.0, "memory_gib": 80.0, "celsius": 61.0}


def beat(world: World, job: str, *gpus: dict[str, Any]) -> None:
    world.do(world.hub.attempts.beat(ADA, job, 1, is_running=True, cost_usd=0.0, gpus=gpus))


def samples(world: World, job: str) -> list[tuple[int, dict[str, Any]]]:
    """Return time and body of the events about the GPUs of a job."""
    rows = world.do(world.hub.database.read(journal.events_of, ADA.project, f"gpu/{job}", 1000))
    assert {row.kind for row in rows} <= {"gpu.sampled"}
    return [(row.at, json.loads(row.body)) for row in rows]


@both
def test_samples_become_events_but_not_more_often_than_each_fifteen_seconds(world: World) -> None:
    job = world.submit()
    world.begin(job)
    beat(world, job)
    assert samples(world, job) == []
    times = []
    for passed_s in (0, 14, 1, 1, 14):
        world.now_s += passed_s
        times.append(world.clock())
        beat(world, job, SAMPLE)
    facts = {"job": job, "name": "train", "attempt": 1, "machines": "local"}
    assert samples(world, job) == [(times[at], {**facts, "gpus": [SAMPLE]}) for at in (0, 2, 4)]
    world.now_s -= 3600  # somebody has set the clock back
    beat(world, job, SAMPLE)
    assert len(samples(world, job)) == 4


@both
def test_only_the_newest_samples_of_a_job_are_kept(world: World) -> None:
    job, other = world.submit(), world.submit("other")
    world.begin(job)
    world.begin(other)
    beat(world, other, SAMPLE)
    for _ in range(KEPT + 3):
        world.now_s += 30
        beat(world, job, SAMPLE)
    kept = samples(world, job)
    assert (len(kept), kept[-1][0]) == (KEPT, world.clock())
    assert len(samples(world, other)) == 1
