"""Saves of jobs: noted once each, by the hub's clock, and missed when they do not come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyward.hub.model.notices import NoticeRules
from skyward.hub.services.hub import Hub
from skyward.hub.services.jobs.history import JobHistory
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from tests.hub.services.hubs import ADA
from tests.hub.services.jobs.job_world import World, both


def note(number: int, age_s: float = 0.0) -> dict[str, Any]:
    facts = {"path": f"/out/checkpoint-{number}", "step": number, "bytes": 100, "seconds": 0.5}
    return {**facts, "number": number, "age_s": age_s}


def beat(world: World, job: str, *saves: dict[str, Any]) -> None:
    world.do(world.hub.attempts.beat(ADA, job, 1, is_running=True, cost_usd=0.0, saves=saves))


def history(world: World, job: str) -> JobHistory:
    return world.do(world.hub.histories.history(ADA, job))


@both
def test_each_save_is_an_event_of_its_attempt_also_if_its_answer_was_lost(world: World) -> None:
    job = world.submit()
    world.begin(job)
    world.now_s += 10
    beat(world, job, note(1, age_s=4.0))
    beat(world, job, note(1, age_s=6.0), note(2))
    seen = [event for event in history(world, job).events if event.kind == "saved"]
    assert [(event.attempt, event.save) for event in seen] == [
        (1, {"path": f"/out/checkpoint-{number}", "step": number, "bytes": 100, "seconds": 0.5}) for number in (1, 2)
    ]
    assert history(world, job).attempts[0].saved_at == world.clock()


@both
def test_owner_hears_once_that_the_newest_checkpoint_is_too_old(world: World, tmp_path: Path) -> None:
    world.do(world.hub.close())
    rules = NoticeRules(commands=["/bin/true"])
    world.hub = Hub(
        Database(world.url, clock=world.clock), FolderBlobs(tmp_path / "blobs"), steady=world.steady, rules=rules
    )
    job = world.submit(checkpoint_interval_s=100, notify=[{"command": ["/bin/true"], "on": ["checkpoint_late"]}])
    world.begin(job)
    world.pass_s(149)
    assert history(world, job).attempts[0].late_at is None
    world.pass_s(2)
    late_at = world.clock()
    world.pass_s(10)
    facts = history(world, job)
    assert (facts.attempts[0].late_at, [one.kind for one in facts.deliveries]) == (late_at, ["checkpoint_late"])
    beat(world, job, note(1))
    assert history(world, job).attempts[0].late_at is None
    world.pass_s(151)
    kinds = [event.kind for event in history(world, job).events]
    assert kinds.count("checkpoint_late") == 2
