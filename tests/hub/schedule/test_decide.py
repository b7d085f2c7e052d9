"""Rules of the hub's scheduler, one at a time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC

import pytest

from skyward.hub.schedule import (
    AttemptState,
    EndCause,
    HubJob,
    JobAttempt,
    JobQuota,
    JobsSnapshot,
    MachineSet,
    Policy,
    PolicyName,
    Priority,
    ProjectState,
    SetKind,
    Shape,
    UserState,
    decide,
)
from skyward.hub.schedule.limits import MOST_DRIVERS

NOW = 1_000_000.0
LAB = MachineSet(name="lab", nodes=4, devices=8, accelerator="A100")


def job(
    name: str,
    devices: int | None = 8,
    nodes: int = 1,
    *,
    order: int = 0,
    project: str = "nlp",
    hours: float = 1.0,
    priority: Priority = Priority.MEDIUM,
    is_preemptible: bool = False,
    accelerator: str = "",
    user: str = "",
) -> HubJob:
    shape = Shape(nodes=nodes, devices=devices, accelerator=accelerator)
    return HubJob(
        id=name,
        project=project,
        user=user,
        order=order,
        shape=shape,
        max_duration_s=hours * 3600,
        priority=priority,
        is_preemptible=is_preemptible,
    )


def running(
    of: HubJob, *nodes: int, ago_s: float = 600.0, saved_ago_s: float | None = None, on: str = "lab"
) -> JobAttempt:
    saved_at = 0.0 if saved_ago_s is None else NOW - saved_ago_s
    return JobAttempt(job=of, machines=on, nodes=nodes, began_at=NOW - ago_s, saved_at=saved_at)


def placed(snapshot: JobsSnapshot) -> dict[str, tuple[int, ...]]:
    return {placement.job: placement.nodes for placement in decide(snapshot, NOW).placements}


def why(snapshot: JobsSnapshot, name: str) -> str:
    return decide(snapshot, NOW).waiting[name].sentence(UTC)


def test_a_gang_gets_all_of_its_nodes_or_none() -> None:
    busy = running(job("busy"), 0)
    four, three = job("four", nodes=4), job("three", nodes=3)
    assert placed(JobsSnapshot(machines=(LAB,), waiting=(four,), attempts=(busy,))) == {}
    assert placed(JobsSnapshot(machines=(LAB,), waiting=(three,), attempts=(busy,))) == {"three": (1, 2, 3)}


def test_a_job_without_nodes_begins_on_full_machines_and_waits_only_for_a_launcher() -> None:
    busy = running(job("busy", nodes=4), 0, 1, 2, 3)
    driver, gang = job("driver", nodes=0, order=2), job("gang", nodes=2, order=1)
    snapshot = JobsSnapshot(machines=(LAB,), waiting=(gang, driver), attempts=(busy,))
    assert placed(snapshot) == {"driver": ()}
    made = decide(replace(snapshot, machines=(replace(LAB, is_draining=True),)), NOW)
    assert not made.placements
    assert not made.reservations
    reason = "waits for a launcher: the machines begin no jobs, because they are drained"
    assert made.waiting["driver"].sentence(UTC).startswith(reason)
    drivers = tuple(running(job(f"driver-{number}", nodes=0)) for number in range(MOST_DRIVERS))
    crowded = why(JobsSnapshot(machines=(LAB,), waiting=(driver,), attempts=drivers), "driver")
    assert crowded == "waits for a launcher: machines lab have 64 jobs without nodes already"
    lonely = why(JobsSnapshot(machines=(), waiting=(driver,)), "driver")
    assert lonely == "waits for a launcher: no machines of this hub can run it"


def test_small_jobs_fill_nodes_that_are_in_use_already() -> None:
    busy = running(job("busy", 5), 2)
    waiting = (job("a", 2, order=1), job("b", 1, order=2), job("c", 1, order=3))
    assert placed(JobsSnapshot(machines=(LAB,), waiting=waiting, attempts=(busy,))) == {"a": (2,), "b": (2,), "c": (0,)}


def test_a_job_passes_the_first_one_only_if_it_ends_before_its_reservation() -> None:
    """Three nodes are busy for another half hour; the gang of four waits for them on all four nodes."""
    busy = running(job("busy", nodes=3, hours=1.0), 0, 1, 2, ago_s=1800.0)
    gang = job("gang", nodes=4, order=1)
    short, long = job("short", order=3, hours=0.4), job("long", order=2, hours=0.6)
    snapshot = JobsSnapshot(machines=(LAB,), waiting=(gang, long, short), attempts=(busy,))
    made = decide(snapshot, NOW)
    assert [placement.job for placement in made.placements] == ["short"]
    assert made.reservations[0].job == "gang"
    assert made.reservations[0].at == NOW + 1800.0
    assert made.waiting["long"].ahead == 1


def test_a_job_that_may_be_preempted_borrows_reserved_machines_and_gives_them_back() -> None:
    busy = running(job("busy", nodes=3), 0, 1, 2, ago_s=1800.0)
    gang, long = job("gang", nodes=4, order=1), job("long", order=2, hours=50, is_preemptible=True)
    (placement,) = decide(JobsSnapshot(machines=(LAB,), waiting=(gang, long), attempts=(busy,)), NOW).placements
    assert placement.job == "long"
    assert placement.on_loan
    borrower = replace(running(long, 3), on_loan=True)
    (placement,) = decide(JobsSnapshot(machines=(LAB,), waiting=(gang,), attempts=(borrower,)), NOW).placements
    assert placement.job == "gang"
    assert placement.victims == ("long",)


def test_a_job_with_a_reservation_keeps_its_turn_when_shares_change() -> None:
    busy = running(job("busy", nodes=3, project="vision"), 0, 1, 2)
    gang = job("gang", nodes=4, order=2, project="nlp")
    other = job("other", nodes=2, order=1, project="speech")
    snapshot = JobsSnapshot(machines=(LAB,), waiting=(gang, other), attempts=(busy,), reserved=frozenset({"gang"}))
    assert [reservation.job for reservation in decide(snapshot, NOW).reservations] == ["gang"]
    urgent = replace(job("urgent", nodes=2, order=3), priority=Priority.HIGH)
    snapshot = replace(snapshot, waiting=(gang, other, urgent))
    assert decide(snapshot, NOW).reservations[0].job != "gang"


def test_one_kind_of_device_never_blocks_another() -> None:
    old = MachineSet(name="old", nodes=1, devices=8, accelerator="V100")
    busy = running(job("busy", nodes=4), 0, 1, 2, 3)
    first, second = job("first", order=1, accelerator="A100"), job("second", order=2, accelerator="V100")
    assert placed(JobsSnapshot(machines=(LAB, old), waiting=(first, second), attempts=(busy,))) == {"second": (0,)}


def test_the_project_with_the_lowest_share_takes_the_next_turn() -> None:
    busy = running(job("busy", nodes=2, project="vision"), 0, 1)
    waiting = tuple(job(f"{project}{n}", order=n, project=project) for n in range(2) for project in ("vision", "nlp"))
    assert list(placed(JobsSnapshot(machines=(LAB,), waiting=waiting, attempts=(busy,)))) == ["nlp0", "nlp1"]


def test_past_use_and_weights_count_in_shares() -> None:
    node = replace(LAB, nodes=1)
    waiting = (job("v", project="vision", order=1), job("n", project="nlp", order=2))
    used = ProjectState(name="vision", used={"A100": 32 * 86_400.0})
    assert list(placed(JobsSnapshot(machines=(node,), projects=(used,), waiting=waiting))) == ["n"]
    heavy = replace(used, weight=100.0)
    light = ProjectState(name="nlp", used={"A100": 86_400.0})
    assert list(placed(JobsSnapshot(machines=(node,), projects=(heavy, light), waiting=waiting))) == ["v"]


def test_large_gangs_take_turns_by_age_unless_their_project_is_far_ahead() -> None:
    small = job("small", project="nlp", order=1)
    gangs = (job("v", nodes=3, project="vision", order=2), job("n", nodes=3, project="nlp", order=3))
    used = ProjectState(name="vision", used={"A100": 32 * 86_400.0})  # a tenth of the machines, lately
    snapshot = JobsSnapshot(machines=(LAB,), projects=(used,), waiting=(small, *gangs))
    assert list(placed(snapshot)) == ["v", "small"]
    far_ahead = replace(used, used={"A100": 10 * used.used["A100"]})
    assert list(placed(replace(snapshot, projects=(far_ahead,)))) == ["n", "small"]


def test_large_gangs_of_two_projects_reserve_nodes_of_their_own() -> None:
    lab = replace(LAB, nodes=8)
    busy = tuple(running(job(f"busy-{node}", hours=node + 1), node) for node in range(8))
    projects = {"a": "vision", "b": "vision", "c": "speech", "d": "robots"}
    waiting = tuple(job(name, nodes=3, order=at, project=of) for at, (name, of) in enumerate(projects.items()))
    made = decide(JobsSnapshot(machines=(lab,), waiting=waiting, attempts=busy), NOW)
    assert [(one.job, one.nodes) for one in made.reservations] == [("a", (0, 1, 2)), ("c", (3, 4, 5))]


def test_large_gangs_leave_room_for_the_reservation_of_another_job() -> None:
    """Otherwise gangs of two projects could hold all reservations for good, one after the other."""
    lab = replace(LAB, nodes=8)
    busy = tuple(running(job(f"busy-{node}", hours=node + 1), node) for node in range(8))
    gangs = (job("a", nodes=4, order=1, project="vision"), job("b", nodes=4, order=2, project="speech"))
    small = job("small", order=3, project="robots")
    made = decide(JobsSnapshot(machines=(lab,), waiting=(*gangs, small), attempts=busy), NOW)
    assert [(one.job, one.nodes) for one in made.reservations] == [("a", (0, 1, 2, 3)), ("small", (4,))]


@pytest.mark.parametrize(("policy", "first"), [(PolicyName.FIFO, "early"), (PolicyName.PRIORITY, "urgent")])
def test_other_policies_order_jobs_whatever_their_project(policy: PolicyName, first: str) -> None:
    early = job("early", nodes=4, order=1)
    urgent = replace(job("urgent", nodes=4, order=2, project="vision"), priority=Priority.HIGH)
    snapshot = JobsSnapshot(machines=(LAB,), waiting=(urgent, early), policy=Policy(name=policy))
    assert list(placed(snapshot)) == [first]


class TestMakingWay:
    """Preemption: only of lower ranks, only where allowed, only if a job begins, and of the fewest."""

    def test_a_lower_priority_of_the_project_makes_way_if_it_allows_that(self) -> None:
        low = job("low", nodes=4, priority=Priority.LOW, is_preemptible=True)
        urgent = job("urgent", nodes=2, priority=Priority.HIGH)
        (placement,) = decide(self.snapshot(urgent, running(low, 0, 1, 2, 3)), NOW).placements
        assert placement.victims == ("low",)
        fixed = replace(low, is_preemptible=False)
        assert placed(self.snapshot(urgent, running(fixed, 0, 1, 2, 3))) == {}

    @pytest.mark.parametrize("change", [{"priority": Priority.HIGH}, {"project": "vision"}])
    def test_equal_priorities_and_other_projects_stay(self, change: dict[str, object]) -> None:
        stays = replace(job("stays", nodes=4, priority=Priority.LOW, is_preemptible=True), **change)  # type: ignore[arg-type]
        urgent = job("urgent", priority=Priority.HIGH)
        assert placed(self.snapshot(urgent, running(stays, 0, 1, 2, 3))) == {}

    def test_the_fewest_make_way_and_of_those_the_ones_that_lose_least(self) -> None:
        def low(name: str, devices: int) -> HubJob:
            return job(name, devices, priority=Priority.LOW, is_preemptible=True)

        attempts = (
            running(low("a1", 4), 0, saved_ago_s=1),
            running(low("a2", 4), 0, saved_ago_s=1),
            running(low("b", 8), 1, saved_ago_s=500),
            running(low("c", 8), 2, saved_ago_s=5),
            running(low("d", 8), 3, saved_ago_s=50),
        )
        urgent = job("urgent", priority=Priority.HIGH)
        (placement,) = decide(self.snapshot(urgent, *attempts), NOW).placements
        assert (placement.victims, placement.nodes) == (("c",), (2,))

    def test_nobody_makes_way_if_the_job_would_not_begin_even_then(self) -> None:
        low = job("low", nodes=2, priority=Priority.LOW, is_preemptible=True)
        fixed = job("fixed", nodes=2)
        urgent = job("urgent", nodes=3, priority=Priority.HIGH)
        made = decide(self.snapshot(urgent, running(low, 0, 1), running(fixed, 2, 3)), NOW)
        assert made.placements == ()

    def test_machines_of_a_victim_go_to_nobody_else(self) -> None:
        low = replace(running(job("low", nodes=4, is_preemptible=True), 0, 1, 2, 3), state=AttemptState.PREEMPTING)
        heir = JobAttempt(
            job=job("heir", nodes=4),
            machines="lab",
            nodes=(0, 1, 2, 3),
            state=AttemptState.RESERVED,
            began_at=NOW,
            waits_for=frozenset({"low"}),
        )
        made = decide(self.snapshot(job("other", 1), low, heir), NOW)
        assert made.placements == ()
        assert made.waiting["heir"].sentence() == "waits for 32 devices on 4 nodes: 1 job saves and ends for it"
        assert made.reservations[0].at > NOW + heir.job.max_duration_s

    def test_borrowed_devices_are_given_back(self) -> None:
        projects = tuple(ProjectState(name=name, quota=JobQuota(devices={"A100": 16})) for name in ("nlp", "vision"))
        borrowers = [running(job(f"v{n}", project="vision", is_preemptible=True), n, ago_s=100 - n) for n in range(4)]
        snapshot = replace(self.snapshot(job("own"), *borrowers), projects=projects)
        (placement,) = decide(snapshot, NOW).placements
        assert placement.victims[0] in ("v2", "v3"), "v0 and v1 began first, so they are the project's own"
        above = replace(snapshot, waiting=(job("above", nodes=3),))
        assert decide(above, NOW).placements == (), "24 devices are more than the project's own 16"

    @staticmethod
    def snapshot(waiting: HubJob, *attempts: JobAttempt) -> JobsSnapshot:
        return JobsSnapshot(machines=(LAB,), waiting=(waiting,), attempts=attempts)


class TestLimits:
    """Quotas of projects and users, money and time."""

    @pytest.mark.parametrize(
        ("quota", "expected"),
        [
            (JobQuota(jobs=1), "project nlp runs 1 of 1 jobs"),
            (JobQuota(nodes=2), "project nlp uses 1 of 2 nodes"),
            (JobQuota(devices={"A100": 16}, may_borrow=False), "project nlp uses 8 of 16 A100"),
            (JobQuota(usd_per_day=10.0), "project nlp has spent 12.00 of 10.00 USD today"),
        ],
    )
    def test_a_job_waits_for_its_limit_and_says_so(self, quota: JobQuota, expected: str) -> None:
        project = ProjectState(name="nlp", quota=quota, spent_today_usd=12.0)
        waiting = (job("gang", nodes=2, order=1), job("other", nodes=2, project="vision", order=2))
        snapshot = JobsSnapshot(machines=(LAB,), projects=(project,), waiting=waiting, attempts=(running(job("x"), 0),))
        assert list(placed(snapshot)) == ["other"], "nobody waits behind another project's limit"
        assert why(snapshot, "gang") == f"waits for 16 devices on 2 nodes: {expected}"

    def test_users_have_limits_too(self) -> None:
        waiting = (job("a", user="ada", order=1), job("b", user="ada", order=2), job("c", user="bob", order=3))
        snapshot = JobsSnapshot(
            machines=(LAB,), users=(UserState(name="ada", quota=JobQuota(jobs=1)),), waiting=waiting
        )
        assert list(placed(snapshot)) == ["a", "c"]
        assert why(snapshot, "b").endswith("user ada runs 1 of 1 jobs")

    def test_attempts_end_with_their_time_their_budget_and_their_projects_money(self) -> None:
        attempts = (
            running(job("late", hours=1), 0, ago_s=3600),
            running(replace(job("dear"), budget_usd=5.0, spent_usd=5.0), 1),
            running(job("poor", project="vision"), 2),
            running(job("fine"), 3),
            running(job("hers", user="ada"), 4),
        )
        poor = ProjectState(name="vision", quota=JobQuota(usd_per_month=100.0), spent_month_usd=100.0)
        ada = UserState(name="ada", quota=JobQuota(usd_per_day=5.0), spent_today_usd=5.5)
        ends = decide(JobsSnapshot(machines=(LAB,), projects=(poor,), users=(ada,), attempts=attempts), NOW).ends
        expected = {
            "late": EndCause.TIME,
            "dear": EndCause.BUDGET,
            "poor": EndCause.QUOTA_MONEY,
            "hers": EndCause.QUOTA_MONEY,
        }
        assert {end.job: end.cause for end in ends} == expected


class TestSets:
    """Choice among sets of machines."""

    def test_the_cheapest_set_with_room_is_taken(self) -> None:
        cloud = replace(LAB, name="cloud", kind=SetKind.ELASTIC, usd_per_hour=10.0, max_usd_per_hour=25.0)
        waiting = (job("a", nodes=4, order=1), job("b", nodes=2, order=2), job("c", order=3))
        made = decide(JobsSnapshot(machines=(cloud, LAB), waiting=waiting), NOW)
        assert [(placement.job, placement.machines) for placement in made.placements] == [("a", "lab"), ("b", "cloud")]
        assert "c" in made.waiting, "25 USD an hour pay for two nodes"

    def test_a_full_provider_is_left_alone_for_a_while(self) -> None:
        full = replace(LAB, full_until=NOW + 600.0)
        snapshot = JobsSnapshot(machines=(full,), waiting=(job("a"),))
        assert placed(snapshot) == {}
        assert "the provider or its launcher has none until" in why(snapshot, "a")

    @pytest.mark.parametrize("nodes", [0, 1])
    def test_machines_whose_launcher_is_too_old_are_the_last_resort_of_jobs_that_need_a_newer_one(
        self, nodes: int
    ) -> None:
        old = replace(LAB, name="a", older_until=NOW + 600.0)
        new = replace(LAB, name="b", usd_per_hour=1.0)
        one = replace(job("one", nodes=nodes), needs_newer=True)

        def sets(*machines: MachineSet, job: HubJob = one, attempts: tuple[JobAttempt, ...] = ()) -> list[str]:
            made = decide(JobsSnapshot(machines=machines, waiting=(job,), attempts=attempts), NOW)
            return [placement.machines for placement in made.placements]

        assert sets(old, new) == ["b"]
        assert sets(old, new, job=replace(one, needs_newer=False)) == ["a"]
        assert sets(replace(old, older_until=NOW), new) == ["a"], "the launcher may be another one by now"
        assert sets(old) == ["a"]
        assert sets(old, replace(new, is_draining=True)) == ["a"]
        busy = tuple(running(job(f"r{node}"), node, on="b") for node in range(4))
        assert sets(old, new, attempts=busy) == ([] if nodes else ["b"]), "it waits for machines that can run it"

    def test_a_drained_set_begins_nothing(self) -> None:
        snapshot = JobsSnapshot(machines=(replace(LAB, is_draining=True),), waiting=(job("a"),))
        assert why(snapshot, "a") == "waits for 8 devices: the machines begin no jobs, because they are drained"

    def test_a_job_that_no_set_can_hold_says_so(self) -> None:
        snapshot = JobsSnapshot(machines=(LAB,), waiting=(job("a", accelerator="H100"),))
        assert why(snapshot, "a") == "waits for 8 H100: no machines of this hub can run it"

    def test_a_set_is_for_the_projects_that_it_names(self) -> None:
        ours = replace(LAB, projects=frozenset({"vision"}))
        snapshot = JobsSnapshot(machines=(ours,), waiting=(job("a"), job("b", project="vision")))
        assert placed(snapshot) == {"b": (0,)}
        assert why(snapshot, "a") == "waits for 8 devices: no machines that its project may use can run it"

    def test_a_machine_that_is_kept_for_such_a_job_is_preferred(self) -> None:
        kept = replace(LAB, warm={0: "vision", 2: "nlp"})
        assert placed(JobsSnapshot(machines=(kept,), waiting=(replace(job("a"), warm="nlp"),))) == {"a": (2,)}
        assert placed(JobsSnapshot(machines=(kept,), waiting=(replace(job("a"), warm="speech"),))) == {"a": (1,)}

    def test_nodes_that_are_down_hold_nothing(self) -> None:
        assert placed(JobsSnapshot(machines=(replace(LAB, down=frozenset({0, 1})),), waiting=(job("a"),))) == {
            "a": (2,)
        }

    def test_devices_that_lie_apart_are_reported(self) -> None:
        attempts = tuple(running(job(f"r{n}", 5), n) for n in range(4))
        snapshot = JobsSnapshot(machines=(LAB,), waiting=(job("a", 8),), attempts=attempts)
        (stranded,) = decide(snapshot, NOW).stranded
        assert (stranded.machines, stranded.devices) == ("lab", 12)


def test_the_sentence_names_what_is_free_and_who_is_ahead() -> None:
    projects = (ProjectState(name="nlp", quota=JobQuota(devices={"A100": 64})),)
    busy = running(job("busy", 8, nodes=3), 0, 1, 2)
    waiting = (job("a", 8, nodes=2, order=1, accelerator="A100"), job("b", 8, nodes=2, order=2, accelerator="A100"))
    snapshot = JobsSnapshot(machines=(LAB,), projects=projects, waiting=waiting, attempts=(busy,))
    quota = "project nlp uses 24 of 64 A100"
    assert why(snapshot, "a") == f"waits for 16 A100 on 2 nodes: 8 free; not before 14:36; {quota}"
    assert why(snapshot, "b") == f"waits for 16 A100 on 2 nodes: 8 free; 1 job is ahead of it; {quota}"
