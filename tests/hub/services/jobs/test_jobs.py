"""The life of jobs: queued, placed, run, lost, preempted, ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from skyward.hub.model.access import Actor
from skyward.hub.model.jobs import FEEDS, AttemptEnd, Feed, JobPriority, JobState
from skyward.hub.model.quotas import JobQuotaRecord, JobQuotaSpec
from skyward.hub.model.refusal import Refusal
from skyward.hub.services.hub import Hub
from skyward.hub.services.jobs.jobs import KEPT_DAYS, NewJob
from skyward.hub.services.jobs.launchers import SILENT_S
from skyward.hub.services.jobs.scheduler import FENCE_S, START_S
from skyward.hub.store.attempts import PIECE, read_feed
from skyward.hub.store.database import Database
from skyward.hub.store.leases import NotHeld
from skyward.hub.store.transaction import ReadSnapshot, Transaction
from tests.hub.services.hubs import ADA, ADMIN, VIEWER, add_project
from tests.hub.services.jobs.job_world import LOCAL, OWNER, SPEC, World, both, pieces


@both
def test_job_goes_from_the_queue_to_its_value_and_is_charged_to_its_project(world: World) -> None:
    job = world.submit()
    assert world.state(job) == "queued"
    world.pass_s(1)
    assert world.state(job) == "reserved"
    (launch,) = world.poll().start
    assert (launch.job, launch.attempt, launch.machines.name, launch.project) == (job, 1, "local", "default")
    assert world.state(job) == "starting"
    world.beat(job, is_running=False)
    assert world.state(job) == "starting"
    world.beat(job)
    assert world.state(job) == "running"
    world.now_s += 10
    world.end(job, AttemptEnd.COMPLETED)
    record = world.job(job)
    assert (record.state, record.results, record.attempt_count) == (JobState.COMPLETED, ["value"], 1)
    (attempt,) = record.attempts
    assert (attempt.end, attempt.machines, len(attempt.nodes)) == ("completed", "local", 1)
    world.do(world.hub.attempts.end(ADA, job, 1, AttemptEnd.COMPLETED))  # said again, because the answer was lost
    _, content = world.do(world.hub.jobs.open_blob(ADA, job, "value"))
    assert b"".join(content) == b"42"
    assert world.poll().forget == [(job, 1)]


def test_job_of_a_known_key_is_the_first_one(world: World) -> None:
    first = world.submit(key="monday")
    assert world.submit(key="monday") == first
    assert world.submit(key="tuesday") != first
    assert len(world.do(world.hub.jobs.jobs(ADA, 10)).items) == 2


def test_fixed_machines_are_shared_by_the_projects_that_somebody_names(world: World) -> None:
    vision = replace(OWNER, project=add_project(world.hub.database, "vision"))
    declare = world.hub.capacity.declare

    def users(name: str) -> object:
        return {record.spec.name: record.spec.projects for record in world.do(world.hub.capacity.sets(OWNER))}[name]

    lab = replace(LOCAL, name="lab", projects=None)
    world.do(declare(vision, lab))
    assert users("lab") == ["vision"]
    world.do(declare(vision, replace(lab, projects=("vision", "default"))))
    assert users("lab") == ["vision", "default"]
    world.do(declare(vision, replace(lab, projects=("*",))))
    assert users("lab") is None
    world.do(declare(vision, replace(lab, name="cloud", kind="elastic")))
    assert users("cloud") is None
    with pytest.raises(Refusal, match=r"projects='visoin': no such project; did you mean 'vision'\?"):
        world.do(declare(OWNER, replace(lab, projects=("visoin",))))


def test_waiting_job_says_why_and_gang_is_placed_whole(world: World) -> None:
    small, gang = world.submit("small", nodes=2), world.submit("gang", nodes=4)
    world.begin(small)
    assert world.state(gang) == "queued"
    assert world.job(gang).why.startswith("waits for 4 nodes: 2 free")
    too_large = world.submit("huge", nodes=5)
    world.pass_s(1)
    assert world.job(too_large).why == "waits for 5 nodes: no machines of this hub can run it"
    world.end(small, AttemptEnd.COMPLETED)
    world.pass_s(1)
    assert world.state(gang) == "reserved"
    assert world.job(gang).attempts[0].nodes == (0, 1, 2, 3)


@both
def test_job_is_cancelled_in_each_state(world: World) -> None:
    cancel = world.hub.jobs.cancel
    queued = world.submit(is_held=True)
    world.do(cancel(ADA, queued))
    assert world.state(queued) == "cancelled"
    reserved = world.submit()
    world.pass_s(1)
    world.do(cancel(ADA, reserved))
    assert (world.state(reserved), world.job(reserved).attempts[0].end) == ("cancelled", "withdrawn")
    running = world.submit()
    world.begin(running)
    world.do(cancel(ADA, running))
    assert (world.state(running), world.beat(running)) == ("running", "abort")
    world.end(running, AttemptEnd.STOPPED)
    assert world.state(running) == "cancelled"
    with pytest.raises(Refusal, match="is cancelled and is over"):
        world.do(cancel(ADA, running))
    world.do(world.hub.jobs.retry(ADA, running))
    world.begin(running, 2)


def test_errors_of_the_user_spend_retries_and_failed_starts_their_own(world: World) -> None:
    job = world.submit(retries=1)
    world.begin(job)
    world.end(job, AttemptEnd.FAILED, error="ValueError: no")
    assert (world.state(job), world.job(job).why) == ("queued", "ValueError: no")
    world.pass_s(0.5)
    assert world.state(job) == "queued"  # it pauses
    world.pass_s(0.6)
    world.begin(job, 2)
    world.end(job, AttemptEnd.FAILED, 2, error="ValueError: still no")
    assert (world.state(job), world.job(job).why) == ("failed", "ValueError: still no")
    unlucky = world.submit()
    for number in range(1, 5):
        world.pass_s(10)
        world.poll()
        world.end(unlucky, AttemptEnd.START_FAILED, number, error="AuthFailed: no key")
    assert (world.state(unlucky), world.job(unlucky).attempt_count) == ("failed", 4)


@both
def test_lost_runner_gets_a_successor_when_the_lease_of_its_machines_is_over(world: World) -> None:
    job = world.submit()
    world.begin(job)
    world.poll(gone=((job, 1),))
    assert world.state(job) == "lost"
    with pytest.raises(Refusal, match="is over, or has another runner"):  # it was only stopped, and goes on
        world.beat(job)
    world.pass_s(LOCAL.lease_s - 0.5)
    assert world.state(job) == "lost"
    world.pass_s(1)
    assert world.state(job) == "queued"
    world.pass_s(1.1)
    world.begin(job, 2)
    assert [attempt.end for attempt in world.job(job).attempts] == ["lost", ""]
    with pytest.raises(Refusal, match="attempt=1: is over"):
        world.end(job, AttemptEnd.COMPLETED)
    assert world.job(job).results == []
    world.end(job, AttemptEnd.COMPLETED, 2)
    assert world.state(job) == "completed"


def test_runner_that_stands_still_is_killed_by_its_launcher_or_ends_by_itself(world: World) -> None:
    job = world.submit()
    world.begin(job)
    world.pass_s(SILENT_S + 1)
    assert world.poll().kill == [(job, 1)]
    assert world.state(job) == "running"
    for _ in range(10):  # no launcher is there, and nobody knows whether the runner still writes
        world.pass_s(FENCE_S / 8)
        if world.state(job) != "running":
            break
    assert world.state(job) in ("lost", "queued")
    with pytest.raises(Refusal, match="is over"):
        world.beat(job)


def test_hub_that_was_away_gives_runners_time_to_be_heard_again(world: World) -> None:
    job = world.submit()
    world.begin(job)
    world.do(world.hub.leader.resign())
    world.do(world.hub.scheduler.step())
    world.pass_s(FENCE_S + 60)  # the hub comes back
    assert world.state(job) == "running"
    world.beat(job)


def test_hub_whose_machine_has_slept_gives_runners_and_launchers_time_to_be_heard_again(world: World) -> None:
    job = world.submit(max_duration_s=24 * 3600.0)
    world.begin(job)
    for first in (lambda: world.pass_s(0.1), world.poll, lambda: world.do(world.hub.mark_lost())):
        world.sleep(FENCE_S + 300)
        first()
        world.pass_s(0.1)
        assert not world.poll().kill
        assert world.state(job) == "running"
        world.beat(job)
    world.pass_s(SILENT_S + 1)
    assert world.poll().kill == [(job, 1)]  # looking goes on


def test_failed_start_does_not_end_a_job_with_the_error_of_an_earlier_attempt(world: World) -> None:
    job = world.submit(retries=1)
    world.begin(job)
    world.do(world.hub.attempts.put_result(ADA, job, 1, "error", pieces(b"transient")))
    world.end(job, AttemptEnd.FAILED, error="ValueError: transient")
    for number in range(2, 6):
        world.pass_s(10)
        world.poll()
        world.end(job, AttemptEnd.START_FAILED, number, error="AuthFailed: no key")
    assert (world.state(job), world.job(job).why, world.job(job).results) == ("failed", "AuthFailed: no key", [])


def test_runner_that_never_comes_up_costs_a_start(world: World) -> None:
    job = world.submit()
    world.pass_s(1)
    world.poll()
    world.pass_s(START_S + 1)
    assert (world.state(job), world.job(job).attempts[0].end) == ("queued", "start_failed")
    with pytest.raises(Refusal, match="attempt=1: is over"):
        world.beat(job)


def test_poll_of_a_killed_launcher_loses_no_runner_of_the_next_one(world: World) -> None:
    job = world.submit()

    async def start_again() -> None:
        # It served other machines, so that it takes nothing itself.
        killed = asyncio.create_task(world.hub.launchers.poll(OWNER, "here", machines=["other"], wait_s=0.5))
        await asyncio.sleep(0)
        await world.hub.leader.leads()
        await world.hub.scheduler.step()
        orders = await world.hub.launchers.poll(OWNER, "here", wait_s=10)
        assert [launch.job for launch in orders.start] == [job]
        await world.hub.attempts.beat(ADA, job, 1, is_running=True, cost_usd=0.0)
        await killed

    world.do(start_again())
    assert world.state(job) == "running"


def test_launcher_that_did_not_hear_the_answer_gets_the_attempt_again(world: World) -> None:
    job = world.submit()
    world.pass_s(1)
    world.poll()
    world.launches.clear()
    assert [launch.job for launch in world.poll().start] == [job]
    assert not world.poll("another").start


@both
def test_launcher_serves_the_sets_of_its_providers_and_those_that_it_names(world: World) -> None:
    job = world.submit()
    world.pass_s(1)
    (machines,) = {attempt.machines for attempt in world.job(job).attempts}
    provider = LOCAL.provider["type"]

    def starts(launcher: str, providers: list[str], machines: list[str]) -> list[str]:
        orders = world.do(world.hub.launchers.poll(OWNER, launcher, providers=providers, machines=machines))
        return [launch.job for launch in orders.start]

    assert starts("a", ["aws"], []) == starts("a", ["aws"], ["other"]) == []
    assert starts("a", ["aws", provider], ["other"]) == [job]
    second = world.submit()
    world.pass_s(1)
    assert starts("b", ["aws"], [machines]) == [second]


@pytest.mark.parametrize("world", ["postgresql"], indirect=True)
def test_two_schedulers_and_two_launchers_at_once_begin_each_job_once(world: World) -> None:
    """Each server takes the lead while the other one still believes that it leads, and decides."""
    other = Hub(Database(world.url, clock=world.clock), world.hub.jobs.blobs, steady=world.steady)
    jobs = {world.submit(str(number)) for number in range(9)}
    begun: list[tuple[str, int]] = []

    async def decide(hub: Hub) -> None:
        while not await hub.leader.leads():
            pass  # the other one is just writing its decision
        await hub.scheduler.step()

    async def decide_late(hub: Hub) -> None:
        assert hub.leader.is_leading
        with contextlib.suppress(NotHeld):
            await hub.scheduler.step()

    async def launch(hub: Hub, launcher: str, known: list[tuple[str, int]]) -> None:
        orders = await hub.launchers.poll(OWNER, launcher, known=known)
        known += [(one.job, one.attempt) for one in orders.start]
        begun.extend((one.job, one.attempt) for one in orders.start)

    async def go(first: Hub, second: Hub) -> None:
        assert await first.leader.leads()
        await first.jobs.database.write(age_lease)
        await asyncio.gather(decide_late(first), decide(second))
        await first.jobs.database.write(age_lease)
        await asyncio.gather(launch(first, "first", known[first]), launch(second, "second", known[second]))

    known: dict[Hub, list[tuple[str, int]]] = {world.hub: [], other: []}
    turns = itertools.cycle([(world.hub, other), (other, world.hub)])
    for first, second in itertools.islice(turns, 6):
        before = len(begun)
        world.now_s += 1
        world.do(asyncio.wait_for(go(first, second), 60))
        for job, number in begun[before:]:
            world.beat(job, number)
            world.end(job, AttemptEnd.COMPLETED, number)
    world.do(other.close())
    assert sorted(begun) == sorted((job, 1) for job in jobs)
    assert {world.state(job) for job in jobs} == {"completed"}


def age_lease(tx: Transaction) -> None:
    tx.execute("UPDATE lease SET expires_at = expires_at - 60000")


@both
def test_more_urgent_job_preempts_one_that_comes_back(world: World) -> None:
    low = world.submit("low", nodes=4, is_preemptible=True, priority=JobPriority.LOW)
    world.begin(low)
    urgent = world.submit("urgent", nodes=2, actor=ADMIN, priority=JobPriority.HIGH)
    world.pass_s(1)
    assert (world.state(low), world.state(urgent)) == ("preempting", "reserved")
    assert world.job(low).why == f"makes way for job {urgent}"
    assert not world.poll().start  # its machines are not free
    assert world.beat(low) == "stop"
    world.end(low, AttemptEnd.STOPPED)
    assert world.state(low) == "queued"
    world.begin(urgent)
    world.end(urgent, AttemptEnd.COMPLETED)
    world.begin(low, 2)


def test_job_whose_time_is_over_saves_and_ends(world: World) -> None:
    job = world.submit(max_duration_s=60.0)
    world.begin(job)
    world.pass_s(61)
    assert (world.state(job), world.beat(job)) == ("preempting", "stop")
    world.pass_s(world.hub.scheduler.policy.grace_s + 1)
    assert world.beat(job) == "abort"
    world.end(job, AttemptEnd.STOPPED)
    assert (world.state(job), world.job(job).why) == ("timed_out", "max_duration_s: its time is over")


def test_provider_without_machines_is_not_asked_again_for_a_while(world: World) -> None:
    job = world.submit()
    world.pass_s(1)
    world.poll()
    world.end(job, AttemptEnd.NO_CAPACITY, error="NoCapacity: none")
    world.pass_s(1)
    assert world.job(job).why.startswith("waits for 1 node: the provider or its launcher has none until")
    world.pass_s(61)
    assert world.state(job) == "reserved"


@both
@pytest.mark.parametrize("feed", FEEDS)
def test_output_and_items_count_once_and_are_read_from_any_byte(world: World, feed: Feed) -> None:
    job = world.submit()
    world.begin(job)

    def add(start: int, body: bytes) -> int:
        size: int = world.do(world.hub.attempts.add_to_feed(ADA, job, 1, feed, start, body))
        return size

    assert (add(0, b"hello "), add(0, b"hello "), add(3, b"lo world"), add(20, b"gap")) == (6, 6, 11, 11)

    async def read(start: int) -> bytes:
        pieces = world.hub.jobs.follow(ADA, job, feed=feed, start=start, ends=True)
        return b"".join([piece.body async for piece in pieces])

    assert (world.do(read(0)), world.do(read(4)), world.do(read(9))) == (b"hello world", b"o world", b"ld")
    world.end(job, AttemptEnd.COMPLETED)
    world.do(world.hub.jobs.delete(ADA, job))


@both
def test_reader_of_a_long_output_gets_a_piece_of_it_at_a_time(world: World) -> None:
    """A database would hand out hundreds of pieces, and a follower would ask for all of them hundreds of times."""
    job = world.submit()
    world.begin(job)
    for number in range(4):
        world.do(world.hub.attempts.add_to_feed(ADA, job, 1, "output", number * PIECE, b"%d" % number * PIECE))
    rows: list[Any] = []

    class Noted:
        def __init__(self, snapshot: ReadSnapshot) -> None:
            self._snapshot = snapshot

        def execute(self, sql: str, parameters: Sequence[object]) -> Noted:
            rows[:] = self._snapshot.execute(sql, parameters).fetchall()
            return self

        def fetchall(self) -> list[Any]:
            return rows

    def read(snapshot: ReadSnapshot, start: int) -> bytes:
        ((attempt,),) = snapshot.execute("SELECT pk FROM attempt").fetchall()
        return read_feed(Noted(snapshot), attempt, "output", start)  # type: ignore[arg-type]

    database = world.hub.jobs.database
    assert (world.do(database.read(read, 0)), len(rows)) == (b"0" * PIECE, 1)
    assert (world.do(database.read(read, PIECE + 1)), len(rows)) == (b"1" * (PIECE - 1), 2)
    assert (world.do(database.read(read, 4 * PIECE - 3)), len(rows)) == (b"333", 1)


@both
def test_held_job_waits_and_drained_machines_begin_none(world: World) -> None:
    job = world.submit(is_held=True)
    world.pass_s(1)
    assert (world.state(job), world.job(job).why) == ("queued", "is held; release it")
    world.do(world.hub.capacity.drain(OWNER, "local", True))
    world.do(world.hub.jobs.release(ADA, job))
    world.pass_s(1)
    assert world.job(job).why.endswith("the machines begin no jobs, because they are drained")
    world.do(world.hub.capacity.drain(OWNER, "local", False))
    world.pass_s(1)
    assert world.state(job) == "reserved"
    with pytest.raises(Refusal, match="jobs use it"):
        world.do(world.hub.capacity.remove(OWNER, "local"))


def test_rights_and_wrong_jobs_are_refused_in_words(world: World) -> None:
    job = world.submit(actor=ADMIN)
    with pytest.raises(Refusal, match="role=viewer"):
        world.submit(actor=VIEWER)
    with pytest.raises(Refusal, match="role=researcher: may not delete"):
        world.do(world.hub.jobs.cancel(ADA, job))
    with pytest.raises(Refusal, match="priority=high: only an admin"):
        world.submit(priority=JobPriority.HIGH)
    with pytest.raises(Refusal, match="no such job"):
        world.do(world.hub.jobs.job(replace(ADA, project=2), job))
    with pytest.raises(Refusal, match=r"blobs.call=.*upload them first"):
        world.do(world.hub.jobs.submit(ADA, NewJob(name="a", spec=SPEC, blobs={"call": "0" * 64})))
    with pytest.raises(Refusal, match="is not over; cancel it first"):
        world.do(world.hub.jobs.delete(ADMIN, job))


def test_jobs_on_one_node_get_different_devices_and_a_gang_gets_the_same_on_all_of_its_nodes(world: World) -> None:
    shared = replace(LOCAL, nodes=2, devices=4, accelerator="H100")
    world.do(world.hub.capacity.declare(OWNER, shared))
    small = [world.submit(devices=1) for _ in range(3)]
    world.pass_s(1)
    devices = {launch.job: (tuple(launch.nodes), tuple(launch.devices)) for launch in world.poll().start}
    assert [devices[job] for job in small] == [((0,), (0,)), ((0,), (1,)), ((0,), (2,))]
    world.end(small[1], AttemptEnd.COMPLETED)
    gang = world.submit(devices=2, nodes=2)
    world.pass_s(1)
    (launch,) = world.poll().start
    assert (launch.job, tuple(launch.nodes), tuple(launch.devices)) == (gang, (0, 1), (1, 3))
    pair = world.submit(devices=2)
    world.pass_s(1)
    (launch,) = world.poll().start
    assert (launch.job, tuple(launch.nodes), tuple(launch.devices)) == (pair, (1,), (0, 2))
    world.end(small[0], AttemptEnd.COMPLETED)
    world.end(gang, AttemptEnd.COMPLETED)
    world.submit(devices=2, nodes=2)  # 0, 1 and 3 are free on node 0, and 1 and 3 on node 1
    world.pass_s(1)
    assert tuple(world.poll().start[0].devices) == (1, 3)


def test_gang_waits_while_its_nodes_have_no_free_numbers_in_common(world: World) -> None:
    world.do(world.hub.capacity.declare(OWNER, replace(LOCAL, nodes=2, devices=2, accelerator="H100")))
    first, second, third = (world.submit(devices=1) for _ in range(3))
    world.pass_s(1)
    world.poll()
    world.end(first, AttemptEnd.COMPLETED)  # node 0 has number 0 left, and node 1 number 1
    gang = world.submit(devices=1, nodes=2)
    world.pass_s(1)
    assert world.state(gang) == "queued"
    assert world.job(gang).why == "waits for devices with the same numbers on each of its nodes: 1"
    world.end(third, AttemptEnd.COMPLETED)
    world.pass_s(1)
    assert [tuple(launch.devices) for launch in world.poll().start] == [(0,)]
    assert world.state(second) == "starting"


@both
def test_machines_that_no_launcher_serves_are_given_up_for_others(world: World) -> None:
    job = world.submit()
    world.pass_s(1)
    world.pass_s(11)
    assert world.job(job).why.startswith(
        "no launcher has taken it yet: run `skyward hub launcher` where machines 'local'"
    )
    world.pass_s(START_S)
    assert (world.state(job), world.job(job).attempts) == ("queued", [])
    assert "the provider or its launcher has none until" in world.job(job).why
    other = replace(LOCAL, name="other", provider={"type": "ssh", "hosts": ["a", "b", "c", "d"]})
    world.do(world.hub.capacity.declare(OWNER, other))
    world.pass_s(1)
    assert [(launch.machines.name, launch.attempt) for launch in world.poll().start] == [("other", 1)]


def test_machine_set_that_is_gone_releases_its_jobs(world: World) -> None:
    job = world.submit()
    world.pass_s(1)
    world.do(world.hub.database.write(lambda tx: tx.execute("DELETE FROM machine_set")))
    world.pass_s(1)
    assert world.state(job) == "queued"


def test_error_that_retry_on_does_not_name_spends_all_retries(world: World) -> None:
    job = world.submit(retries=5)
    world.begin(job)
    world.do(world.hub.attempts.end(ADA, job, 1, AttemptEnd.FAILED, error="ValueError: x", may_retry=False))
    assert world.state(job) == "failed"


class TestQuotas:
    """Quotas of projects and users."""

    @both
    def test_jobs_beyond_a_quota_wait_and_say_so_and_begin_when_it_grows(self, world: World) -> None:
        self.limit(world, "user", ADA.user, JobQuotaSpec(nodes=3))
        first, second = world.submit(nodes=2), world.submit(nodes=2)
        other = world.submit(nodes=2, actor=ADMIN)
        world.pass_s(1)
        assert [world.state(job) for job in (first, second, other)] == ["reserved", "queued", "reserved"]
        assert world.job(second).why == f"waits for 2 nodes: user {ADA.user} uses 2 of 3 nodes"
        assert self.quotas(world) == [
            JobQuotaRecord(
                holder="user", name=ADA.user, spec=JobQuotaSpec(nodes=3), devices={"node": 2}, nodes=2, jobs=1
            )
        ]
        world.do(world.hub.jobs.cancel(ADMIN, other))
        self.limit(world, "user", ADA.user, JobQuotaSpec())
        world.pass_s(1)
        assert world.state(second) == "reserved"
        assert self.quotas(world) == []

    @both
    def test_borrowed_nodes_are_given_back_to_the_project_whose_they_are(self, world: World) -> None:
        vision = self.project(world, "vision")
        for name in ("default", "vision"):
            self.limit(world, "project", name, JobQuotaSpec(devices={"node": 2}))
        borrowing = [world.submit(is_preemptible=True) for _ in range(4)]
        for job in borrowing:
            world.begin(job)
        own = world.submit(actor=vision, nodes=2)
        world.pass_s(1)
        assert [world.state(job) for job in borrowing] == ["running", "running", "preempting", "preempting"]
        assert world.do(world.hub.jobs.job(vision, own)).state == "reserved"

    @both
    def test_cost_counts_once_on_its_day_and_ends_the_jobs_whose_money_is_spent(self, world: World) -> None:
        self.limit(world, "project", "default", JobQuotaSpec(usd_per_day=5.0, usd_per_month=100.0))
        job = world.submit(max_duration_s=200_000.0)
        world.begin(job)
        for cost in (2.0, 2.0, 4.0):
            world.beat(job, cost_usd=cost)
        world.pass_s(1)
        assert (self.quotas(world)[0].today_usd, world.state(job)) == (4.0, "running")
        world.now_s += 86_400  # 2027-01-16: the next day begins with nothing
        world.beat(job, cost_usd=8.0)
        world.pass_s(1)
        (record,) = self.quotas(world)
        assert (record.today_usd, record.month_usd, world.state(job)) == (4.0, 8.0, "running")
        world.beat(job, cost_usd=9.5)
        world.pass_s(1)
        assert world.state(job) == "preempting"
        waiting = world.submit()
        world.pass_s(1)
        assert world.job(waiting).why.endswith("project default has spent 5.50 of 5.00 USD today")
        world.end(job, AttemptEnd.STOPPED)
        assert world.state(job) == "failed"
        assert world.job(job).why.startswith("quota: the money of its project or user is spent")

    def test_project_of_greater_weight_takes_more_turns(self, world: World) -> None:
        vision = self.project(world, "vision")
        self.limit(world, "project", "vision", JobQuotaSpec(weight=3.0))
        for actor in (ADA, vision) * 4:
            world.submit(actor=actor)
        world.pass_s(1)
        placed = [world.do(world.hub.jobs.jobs(actor, 10, states=[JobState.RESERVED])) for actor in (ADA, vision)]
        assert [len(page.items) for page in placed] == [1, 3]

    def test_wrong_quotas_are_refused_in_words(self, world: World) -> None:
        for holder, name, spec, words in (
            ("project", "nlp", JobQuotaSpec(jobs=1), "nlp"),
            ("user", "nobody", JobQuotaSpec(jobs=1), "nobody"),
            ("user", ADA.user, JobQuotaSpec(weight=2.0), "weight: users have none"),
            ("project", "default", JobQuotaSpec(weight=0.0), "weight=0.0: is no weight"),
            ("project", "default", JobQuotaSpec(devices={"A100": -1}), "devices.A100=-1: is no limit"),
        ):
            with pytest.raises(Refusal, match=words):
                self.limit(world, holder, name, spec)
        with pytest.raises(Refusal, match="may not own"):
            world.do(world.hub.quotas.set_job_quota(ADMIN, "user", ADA.user, JobQuotaSpec(jobs=1)))
        self.limit(world, "project", "default", JobQuotaSpec(jobs=1))
        assert [record.name for record in world.do(world.hub.quotas.job_quotas(ADA))] == ["default"]

    @staticmethod
    def limit(world: World, holder: Any, name: str, spec: JobQuotaSpec) -> None:
        if name == ADA.user and name not in {user.name for user in world.do(world.hub.people.users(OWNER))}:
            world.do(world.hub.people.create_user(OWNER, name))
        world.do(world.hub.quotas.set_job_quota(OWNER, holder, name, spec))

    @staticmethod
    def quotas(world: World) -> list[JobQuotaRecord]:
        return list(world.do(world.hub.quotas.job_quotas(OWNER)))

    @staticmethod
    def project(world: World, name: str) -> Actor:
        return replace(ADA, project=add_project(world.hub.database, name))


@both
def test_bytes_of_old_jobs_are_forgotten_and_the_rest_stays(world: World) -> None:
    old, schedule = world.submit("old"), world.submit("schedule", cron="@yearly")
    world.begin(old)
    world.do(world.hub.attempts.add_to_feed(ADA, old, 1, "output", 0, b"line\n"))
    world.do(world.hub.attempts.add_to_feed(ADA, old, 1, "items", 0, b"item"))
    world.end(old, AttemptEnd.COMPLETED)
    world.now_s += KEPT_DAYS * 86_400 - 1
    young = world.submit("young")
    world.begin(young)
    world.end(young, AttemptEnd.COMPLETED)
    forget = world.hub.jobs.forget_old
    assert world.do(forget(write=world.hub.database.write)) == 0
    world.now_s += 2
    assert world.do(forget(write=world.hub.database.write)) == 1
    assert world.do(forget(write=world.hub.database.write)) == 0
    record = world.job(old)
    assert (record.state, record.results, record.attempts[0].output_bytes) == (JobState.COMPLETED, [], 0)
    assert world.job(young).results == ["value"]
    assert world.state(schedule) == "queued"
    with pytest.raises(Refusal, match="or they were too old"):
        world.do(world.hub.jobs.open_blob(ADA, old, "value"))
