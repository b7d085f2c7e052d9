"""The decision: who runs where, who makes way, who ends, and why the others wait."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

from .limits import JobLimits, borrowers, budget_spent, overdue
from .reasons import Obstacle, WaitReason
from .room import Room
from .shares import ProjectShare
from .values import (
    Decisions,
    HubJob,
    JobAttempt,
    JobPlacement,
    JobsSnapshot,
    MachineSet,
    PolicyName,
    Priority,
    Stranded,
    with_newer_launchers,
)
from .victims import choose, may_leave

_AHEAD = 0.5
"""Share by which a gang's project may be ahead of the lowest and still take turns by age: half of the machines."""

# A decision goes through all waiting jobs, ten thousand of them within 50 ms. So each step that it takes for every job
# is a call into C or a look at the job's line, and all else is done once for each line.
_ALIKE = attrgetter("shape", "project", "user", "priority", "is_preemptible", "needs_newer")
_IN_TURN = attrgetter("order", "id")


def decide(snapshot: JobsSnapshot, now: float) -> Decisions:
    """Decide what should happen now.

    Jobs are taken in the order of the policy, and each one is placed as a whole or not at all. A job that does not fit
    may displace others: of its own project with a lower priority, or those that hold what is not theirs. If it still
    does not fit, and is the first for its machines, it reserves the earliest time at which it will. Later jobs pass it
    only if they end before that time, leave its machines alone, or may be told to make way for it.

    With fair shares, large gangs take turns by age, one of each project and two at once, in front of the others. By the
    shares alone, the small jobs of a project would pass its gang again and again, because they fit where it does not.

    Args:
        snapshot: Machines, jobs that wait, and jobs that run.
        now: Time in seconds since 1970.

    Example:
        >>> from skyward.hub.schedule import HubJob, MachineSet, Shape, JobsSnapshot, decide
        >>> lab = MachineSet(name="lab", nodes=2, devices=8, accelerator="A100")
        >>> job = HubJob(id="a", project="research", order=1, shape=Shape(nodes=2, devices=8), max_duration_s=3600)
        >>> decide(JobsSnapshot(machines=(lab,), waiting=(job,)), now=0.0).placements[0].nodes
        (0, 1)
    """
    return _Decision(snapshot, now).made()


class _Line:
    """Jobs that are alike except for their duration: what one of them was refused, a longer one need not ask for.

    Args:
        job: The first of them.
        rooms: Rooms whose machines suit them, the cheapest first.
        limit: Limit in money that stops the project; empty if none does.
    """

    def __init__(self, job: HubJob, rooms: tuple[Room, ...], limit: str) -> None:
        self.job, self.rooms, self.limit = job, rooms, limit
        self.open_rooms = [] if limit else [room for room in rooms if room.is_open]
        begin = [room for room in rooms if not room.machines.is_draining] if job.shape.nodes else []
        self.usable = [room for room in begin if room.could_hold(job)]
        self.refused_from_s = math.inf
        self.refusal = ""
        self.has_looked = False
        self.obstacles: dict[str, Obstacle] = {}  # limit, or "" for none -> what those of its jobs wait for


_Wait = tuple[str, _Line, str, int, float]
"""A job that waits: its id, its line, the limit, the jobs ahead of it, and when its machines are free at the latest."""


class _Decision:
    """One decision while it is made."""

    def __init__(self, snapshot: JobsSnapshot, now: float) -> None:
        self._snapshot, self._now, self._policy = snapshot, now, snapshot.policy
        self._sets = {machines.name: machines for machines in sorted(snapshot.machines, key=lambda one: one.name)}
        on_set: defaultdict[str, list[JobAttempt]] = defaultdict(list)
        for attempt in sorted(snapshot.attempts, key=attrgetter("job.id")):
            on_set[attempt.machines].append(attempt)
        self._rooms = {
            name: Room(machines, on_set[name], now, grace_s=self._policy.grace_s)
            for name, machines in self._sets.items()
        }
        self._limits = JobLimits(snapshot, self._sets)
        self._borrowers = borrowers(snapshot.attempts, self._limits, self._sets)
        self._capacity: Counter[str] = Counter()
        for machines in self._sets.values():
            self._capacity[machines.device_kind] += machines.most_nodes * machines.devices
        self._shares: dict[str, ProjectShare] = {}
        for attempt in snapshot.attempts:
            self._hold(attempt.job, self._sets[attempt.machines], len(attempt.nodes))
        self._lines: dict[tuple[object, ...], _Line] = {}
        self._placements: list[JobPlacement] = []
        self._may_leave = {name: self._alike(filter(may_leave, attempts)) for name, attempts in on_set.items()}
        self._leaving: set[str] = set()  # victims of this decision
        self._heads: dict[str, HubJob] = {}  # id -> a job with a reservation
        self._waits: list[_Wait] = []
        self._highest: dict[str, Priority] = {}  # project -> highest priority of its waiting jobs
        for project, priority in sorted(set(map(attrgetter("project", "priority"), snapshot.waiting))):
            self._highest[project] = priority

    def made(self) -> Decisions:
        turns: set[str] = set()
        for job in itertools.chain(self._kept_turns(), self._turns_by_age()):
            if job.id not in turns:
                turns.add(job.id)
                self._consider(job)
        for job in self._in_order([job for job in self._snapshot.waiting if job.id not in turns]):
            self._consider(job)
        waiting = dict(self._reasons()) | self._served()
        ends = (end for end in overdue(self._snapshot, self._limits, self._now) if end.job not in self._leaving)
        return Decisions(
            placements=tuple(self._placements),
            reservations=tuple(reservation for room in self._rooms.values() for reservation in room.reservations),
            ends=tuple(ends),
            waiting=waiting,
            stranded=tuple(self._stranded()),
        )

    def _kept_turns(self) -> list[HubJob]:
        """Return the jobs that had a reservation, unless their project has a job of higher priority by now."""
        reserved = self._snapshot.reserved
        return self._sorted([job for job in self._snapshot.waiting if job.id in reserved and self._is_first(job)])

    def _is_first(self, job: HubJob) -> bool:
        return job.priority == self._highest[job.project]

    def _turns_by_age(self) -> Iterator[HubJob]:
        """Yield large gangs whose turn it is by age. A project that is far ahead of another waits for its share."""
        if self._policy.name is not PolicyName.FAIR_SHARE:
            return
        rooms = self._rooms.values()
        gangs = [job for job in self._snapshot.waiting if job.shape.nodes > 1 and self._is_first(job)]
        large = [job for job in gangs if any(room.is_large(job) for room in rooms)]
        for job in sorted(large, key=_IN_TURN):
            if not any(room.can_reserve(job) for room in rooms):
                continue
            if not any(room.is_large(job) and room.can_reserve(job) for room in self._line(job).usable):
                continue
            if self._share(job.project).value <= _AHEAD + min(self._share(project).value for project in self._highest):
                yield job

    def _in_order(self, jobs: Sequence[HubJob]) -> Iterator[HubJob]:
        """Yield the waiting jobs in the order of the policy. Shares change while jobs are placed."""
        if self._policy.name is not PolicyName.FAIR_SHARE:
            yield from self._sorted(jobs)
            return
        queues: defaultdict[str, list[HubJob]] = defaultdict(list)
        for job in reversed(self._sorted(jobs)):
            queues[job.project].append(job)  # the next one at the end
        heap = [(self._share(project).value, project) for project in queues]
        heapify(heap)
        while heap:
            value, project = heap[0]
            queue, share = queues[project], self._share(project)
            while queue and share.value == value:
                yield queue.pop()
            if queue:
                heapreplace(heap, (share.value, project))
            else:
                heappop(heap)

    def _sorted(self, jobs: Iterable[HubJob]) -> list[HubJob]:
        ordered = sorted(jobs, key=_IN_TURN)
        if self._policy.name is not PolicyName.FIFO:
            ordered.sort(key=lambda job: -job.priority)  # plain ints, which are compared faster than members of an enum
        return ordered

    def _consider(self, job: HubJob) -> None:
        line = self._line(job)
        limit = line.limit or budget_spent(job)
        if not limit and job.max_duration_s < line.refused_from_s:
            if self._place(job, line) or self._displace(job, line):
                return
            line.refused_from_s = job.max_duration_s
            line.refusal = self._refusal(job, line)
        self._wait(job, line, limit or line.refusal)

    def _line(self, job: HubJob) -> _Line:
        key = _ALIKE(job)
        if (line := self._lines.get(key)) is None:
            line = self._lines[key] = self._new_line(job)
        return line

    def _new_line(self, job: HubJob) -> _Line:
        suited = [room for room in self._rooms.values() if room.machines.suits(job.shape, job.project)]
        if job.needs_newer:  # machines whose launcher is too old are the last resort: it may be replaced
            newer = with_newer_launchers((room.machines for room in suited), self._now)
            suited = [self._rooms[machines.name] for machines in newer] or suited
        suited.sort(key=lambda room: (room.machines.usd_per_hour, room.machines.name))
        return _Line(job, tuple(suited), self._limits.money(job))

    def _place(self, job: HubJob, line: _Line) -> bool:
        for room in line.open_rooms:
            if self._limits.refusal(job, room.machines):
                continue
            for may_borrow in (False, True) if self._may_borrow(job, room) else (False,):
                if place := room.place(job, may_borrow=may_borrow):
                    self._book(job, room, place[0], on_loan=place[1])
                    return True
        return False

    def _may_borrow(self, job: HubJob, room: Room) -> bool:
        """Return whether the job may use reserved machines: it can make way, and ranks no higher than their job."""
        if not (job.is_preemptible and room.reservations):
            return False
        return all(job.priority <= self._heads[reservation.job].priority for reservation in room.reservations)

    def _displace(self, job: HubJob, line: _Line) -> bool:
        """Make others leave for the job. Its like would find the same victims, so one of them looks."""
        if line.has_looked:
            return False
        line.has_looked = True
        for room in line.open_rooms:
            if self._limits.refusal(job, room.machines):
                continue
            candidates = [
                attempt
                for attempts in self._may_leave.get(room.machines.name, ())
                if self._may_displace(job, attempts[0], room)
                for attempt in attempts
                if attempt.job.id not in self._leaving
            ]
            if candidates and (choice := choose(room, job, candidates)):
                nodes, victims = choice
                self._book(job, room, nodes, victims=victims)
                return True
        return False

    def _alike(self, attempts: Iterable[JobAttempt]) -> list[list[JobAttempt]]:
        """Group attempts: the same jobs may displace each one of a group."""
        groups: defaultdict[tuple[object, ...], list[JobAttempt]] = defaultdict(list)
        for attempt in attempts:
            job = attempt.job
            groups[job.project, job.priority, attempt.on_loan, job.id in self._borrowers].append(attempt)
        return list(groups.values())

    def _may_displace(self, job: HubJob, victim: JobAttempt, room: Room) -> bool:
        if victim.job.priority > job.priority:
            return False
        if victim.on_loan and (not room.ahead or job.id in self._snapshot.reserved):
            return True
        is_lower = victim.job.priority < job.priority and self._policy.name is not PolicyName.FIFO
        if is_lower and (victim.job.project == job.project or self._policy.name is PolicyName.PRIORITY):
            return True
        is_borrower = victim.job.id in self._borrowers and victim.job.project != job.project
        return is_borrower and self._limits.is_within_own(job, room.machines)

    def _book(
        self,
        job: HubJob,
        room: Room,
        nodes: tuple[int, ...],
        *,
        on_loan: bool = False,
        victims: Sequence[JobAttempt] = (),
    ) -> None:
        """Note that the job gets the nodes, which the room has booked unless victims have to leave first."""
        if victims:
            room.displace(job, nodes, victims)
            self._leaving.update(victim.job.id for victim in victims)
        self._limits.add(job, room.machines, len(nodes))
        self._hold(job, room.machines, len(nodes))
        self._placements.append(
            JobPlacement(
                job=job.id,
                machines=room.machines.name,
                nodes=nodes,
                victims=tuple(sorted(victim.job.id for victim in victims)),
                on_loan=on_loan,
            )
        )

    def _wait(self, job: HubJob, line: _Line, limit: str) -> None:
        """Note that the job waits, and reserve machines for it if no job reserved them before."""
        ahead, not_before = 0, math.inf
        for room in line.rooms:
            ahead = max(ahead, room.ahead)
            if not limit:
                room.ahead += 1
        if line.usable:
            line.usable = unreserved = [room for room in line.usable if room.can_reserve(job)]
            if unreserved and not limit and not self._refusal(job, line):
                first = min(unreserved, key=lambda room: (room.earliest(job)[0], room.machines.name))
                not_before = first.reserve(job).at
                self._heads[job.id] = job
        self._waits.append((job.id, line, limit, ahead, not_before))

    def _refusal(self, job: HubJob, line: _Line) -> str:
        """Return the limit that keeps the job from all of its machines; empty if some are left."""
        limits = [self._limits.refusal(job, room.machines) for room in line.rooms]
        return limits[0] if limits and all(limits) else ""

    def _reasons(self) -> Iterator[tuple[str, WaitReason]]:
        """Yield why each job waits. Jobs of one project that need the same share what they wait for."""
        for job, line, limit, ahead, not_before in self._waits:
            if (obstacle := line.obstacles.get(limit)) is None:
                obstacle = line.obstacles[limit] = self._obstacle(line, limit)
            yield job, WaitReason(obstacle, ahead, not_before)

    def _obstacle(self, line: _Line, limit: str) -> Obstacle:
        shape = line.job.shape
        need = shape.in_words()
        if not line.rooms:
            return Obstacle(need, is_foreign=any(room.machines.fits(shape) for room in self._rooms.values()))
        begin = [room for room in line.rooms if not room.machines.is_draining]
        full_until = [room.machines.full_until for room in begin]
        return Obstacle(
            need=need,
            free=sum(room.all_free() for room in begin if room.is_open),
            limit=limit,
            quota=self._quota(line.job.project, line.rooms),
            full_until=min(full_until, default=0.0) if not any(room.is_open for room in begin) else 0.0,
            is_drained=not begin,
        )

    def _quota(self, project: str, rooms: Sequence[Room]) -> str:
        for kind in dict.fromkeys(room.machines.device_kind for room in rooms):
            if use := self._limits.own_use(project, kind):
                return f"project {project} uses {use[0]} of {use[1]} {kind}"
        return ""

    def _served(self) -> dict[str, WaitReason]:
        """Return why jobs wait whose machines are their own already: their victims have not left."""
        waits = [(attempt.job, len(attempt.waits_for)) for room in self._rooms.values() for attempt in room.attempts]
        return {job.id: WaitReason(Obstacle(job.shape.in_words()), victims=count) for job, count in waits if count}

    def _stranded(self) -> Iterator[Stranded]:
        lines = [line for line in self._lines.values() if "" in line.obstacles]
        for name, room in self._rooms.items():
            devices = room.machines.devices
            stranded = sum(free for free in room.free if 0 < free < devices)
            part = stranded / max(1, devices * len(room.free))
            if part <= self._policy.stranded:
                continue
            if any(room in line.rooms and room.is_scattered(line.job.shape) for line in lines):
                yield Stranded(machines=name, devices=stranded, part=part)

    def _hold(self, job: HubJob, machines: MachineSet, nodes: int) -> None:
        self._share(job.project).add(machines.device_kind, nodes * job.shape.on_each(machines))

    def _share(self, project: str) -> ProjectShare:
        if project not in self._shares:
            self._shares[project] = ProjectShare(
                self._limits.project(project), self._capacity, self._policy.half_life_s
            )
        return self._shares[project]
