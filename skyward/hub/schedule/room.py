"""Room on the nodes of one set: what is free now, what will be free when, and what is reserved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from heapq import nsmallest

from .values import AttemptState, HubJob, JobAttempt, MachineSet, Reservation, Shape

_OVERDUE_S = 60.0
"""Time for which an attempt that should have ended is expected to hold its machines."""
_LARGE = 4
"""A gang is large if it takes at least this part of a set: one node in four."""
_TURNS_OF_LARGE, _TURNS_OF_OTHERS = 2, 1
"""Reservations at once. Large gangs of two projects drain different nodes, so the second loses no time while the first
waits. With both for one project, Jain's index of the simulated services was 0.96, not 0.98."""


class Room:
    """Free devices of each node of a set while a decision is made.

    Args:
        machines: The set.
        attempts: Attempts on its machines.
        now: Time of the decision.
        grace_s: Time that an attempt has to save and end.

    Attributes:
        free: Free devices of each node.
        ahead: Jobs that wait for these machines, as far as they were looked at.
        reservations: Reservations on these machines, each on nodes of its own.

    Example:
        >>> from skyward.hub.schedule import HubJob, MachineSet, Shape
        >>> room = Room(MachineSet(name="lab", nodes=2, devices=8), (), now=0.0)
        >>> room.place(HubJob(id="a", project="p", order=1, shape=Shape(devices=3), max_duration_s=60.0))
        ((0,), False)
        >>> room.free
        [5, 8]
    """

    def __init__(
        self, machines: MachineSet, attempts: Sequence[JobAttempt], now: float, *, grace_s: float = 300.0
    ) -> None:
        self.machines, self.now, self._grace_s = machines, now, grace_s
        self.is_open = not machines.is_draining and machines.full_until <= now
        self.ahead = 0
        count = max([machines.nodes, *(node + 1 for attempt in attempts for node in attempt.nodes)])
        self.usable = [node < machines.most_nodes and node not in machines.down for node in range(count)]
        self.free = [0] * count
        self._nodes_with = Counter(self.free)  # free devices -> nodes
        self.reservations: list[Reservation] = []
        self._large_turns: list[str] = []  # project of each large gang with a reservation
        self._reserved: dict[int, tuple[float, int]] = {}  # node -> when its job begins, and the devices that it takes
        self._spare: dict[int, int] = {}  # reserved node -> devices that its job leaves to others
        self._attempts = {attempt.job.id: attempt for attempt in attempts}
        self._on: list[list[str]] = [[] for _ in range(count)]  # node -> jobs that hold it
        self._leaving: list[list[tuple[float, int]]] = [[] for _ in range(count)]  # node -> (time, devices)
        for attempt in attempts:
            for node in attempt.nodes:
                self._on[node].append(attempt.job.id)
        for node in range(count):
            self._fill(node)

    @property
    def attempts(self) -> Collection[JobAttempt]:
        """Attempts on the machines, with those that were placed by this decision."""
        return self._attempts.values()

    def place(self, job: HubJob, *, may_borrow: bool = False) -> tuple[tuple[int, ...], bool] | None:
        """Give the job machines that are free now.

        A node that is reserved counts only if the job leaves it in time, or if the reserving job leaves devices over.
        `may_borrow` lifts that rule, and the second value of the result says whether it was used.

        Returns:
            Numbers of the nodes, and whether they are on loan; None if the job does not fit.
        """
        each, ends_at = job.shape.on_each(self.machines), self.now + job.max_duration_s
        if self._with_free(each) < job.shape.nodes:
            return None
        fitting: list[tuple[bool, int, int, int]] = []
        for node, free in enumerate(self.free):
            if free >= each and ((is_lent := self._is_reserved(node, each, ends_at)) is False or may_borrow):
                fitting.append((is_lent, self._strangeness(node, job), free, node))
        if len(fitting) < job.shape.nodes:
            return None
        chosen = nsmallest(job.shape.nodes, fitting)
        on_loan = any(is_lent for is_lent, *_ in chosen)
        nodes = tuple(sorted(node for *_, node in chosen))
        self._add(job, nodes, on_loan=on_loan)
        return nodes, on_loan

    def displace(self, job: HubJob, nodes: tuple[int, ...], victims: Sequence[JobAttempt]) -> None:
        """Give the job these nodes once the victims have left."""
        for victim in victims:
            leaves = replace(victim, state=AttemptState.PREEMPTING, ends_by=self.now + self._grace_s)
            self._attempts[victim.job.id] = leaves
        self._add(job, nodes, waits_for=frozenset(victim.job.id for victim in victims))
        for node in {node for victim in victims for node in victim.nodes}:
            self._fill(node)

    def earliest(self, job: HubJob) -> tuple[float, tuple[int, ...]]:
        """Return the time at which the job fits at the latest, and the nodes that are free and unreserved then.

        The set must have as many of these nodes; `could_hold` and `can_reserve` say so.
        """
        each = job.shape.on_each(self.machines)
        nodes = [node for node, can in enumerate(self.usable) if can and node not in self._reserved]
        times = [(self._free_at(node, each), node) for node in nodes]
        chosen = nsmallest(job.shape.nodes, times)
        return max(chosen[-1][0], self.machines.full_until), tuple(sorted(node for _, node in chosen))

    def could_hold(self, job: HubJob) -> bool:
        """Return whether enough nodes are usable, busy or not."""
        return sum(self.usable) >= job.shape.nodes

    def is_large(self, job: HubJob) -> bool:
        """Return whether the job is a gang that takes a large part of the set."""
        return job.shape.nodes > 1 and job.shape.nodes * _LARGE >= self.machines.most_nodes

    def can_reserve(self, job: HubJob) -> bool:
        """Return whether the job can have a reservation beside those of the jobs before it.

        A second large gang leaves room for a job that is none, until that has a reservation too.
        """
        left = sum(self.usable) - len(self._reserved) - job.shape.nodes
        if left < 0:
            return False
        others = len(self.reservations) - len(self._large_turns)
        if not self.is_large(job):
            return others < _TURNS_OF_OTHERS
        if not self._large_turns:
            return True
        if len(self._large_turns) == _TURNS_OF_LARGE or job.project in self._large_turns:
            return False
        return others == _TURNS_OF_OTHERS or left * _LARGE >= self.machines.most_nodes

    def reserve(self, job: HubJob) -> Reservation:
        """Reserve the earliest machines for the job. Later jobs are placed around them."""
        at, nodes = self.earliest(job)
        reservation = Reservation(job=job.id, machines=self.machines.name, nodes=nodes, at=at)
        self.reservations.append(reservation)
        if self.is_large(job):
            self._large_turns.append(job.project)
        for node in nodes:
            self._reserved[node] = (at, job.shape.on_each(self.machines))
            self._spare[node] = self._spared(node)
        return reservation

    def allowed(self, each: int, ends_at: float) -> list[bool]:
        """Return for each node whether a job that ends then may use `each` of its devices, if they were free."""
        allowed = self.usable.copy()
        for node in self._reserved:
            allowed[node] = allowed[node] and not self._is_reserved(node, each, ends_at)
        return allowed

    def all_free(self) -> int:
        """Devices that are free, on all nodes."""
        return sum(self.free)

    def is_scattered(self, shape: Shape) -> bool:
        """Return whether enough devices are free for the shape, but on too many nodes."""
        each = shape.on_each(self.machines)
        return self._with_free(each) < shape.nodes and self.all_free() >= shape.nodes * each

    def _with_free(self, each: int) -> int:
        """Return how many nodes have at least `each` free devices, without a look at every node."""
        return sum(nodes for free, nodes in self._nodes_with.items() if free >= each)

    def _is_reserved(self, node: int, each: int, ends_at: float) -> bool:
        spare = self._spare.get(node)
        return spare is not None and spare < each and ends_at > self._reserved[node][0]

    def _strangeness(self, node: int, job: HubJob) -> int:
        """Rank nodes: first an idle machine that is kept for such a job, last one that is kept for others."""
        kept_for = self.machines.warm.get(node)
        return 1 if kept_for is None else 0 if kept_for == job.warm else 2

    def _free_at(self, node: int, each: int) -> float:
        free, at = self.free[node], self.now
        for leaves, devices in sorted(self._leaving[node]):
            if free >= each:
                break
            free, at = free + devices, leaves
        return at

    def _add(
        self, job: HubJob, nodes: tuple[int, ...], *, on_loan: bool = False, waits_for: frozenset[str] = frozenset()
    ) -> None:
        self._attempts[job.id] = JobAttempt(
            job=job,
            machines=self.machines.name,
            nodes=nodes,
            state=AttemptState.RESERVED,
            began_at=self.now,
            on_loan=on_loan,
            waits_for=waits_for,
        )
        for node in nodes:
            self._on[node].append(job.id)
            self._fill(node)

    def _fill(self, node: int) -> None:
        """Book what the node runs, and what it has promised to attempts whose victims have not left yet."""
        free = self.machines.devices if self.usable[node] else 0
        leaving: list[tuple[float, int]] = []
        pledged: dict[str, int] = {}  # victim -> its devices that go straight to another attempt
        here = [self._attempts[job] for job in self._on[node]]
        for attempt in here:
            each = attempt.job.shape.on_each(self.machines)
            for victim in here if attempt.waits_for else ():
                if victim.job.id in attempt.waits_for:
                    left = victim.job.shape.on_each(self.machines) - pledged.get(victim.job.id, 0)
                    pledged[victim.job.id] = pledged.get(victim.job.id, 0) + min(each, left)
                    each -= min(each, left)
            free -= each
        for attempt in here:
            if surplus := attempt.job.shape.on_each(self.machines) - pledged.get(attempt.job.id, 0):
                leaving.append((self._leaves_at(attempt), surplus))
        self._nodes_with[self.free[node]] -= 1
        self._nodes_with[free] += 1
        self.free[node], self._leaving[node] = free, leaving
        if node in self._reserved:
            self._spare[node] = self._spared(node)

    def _spared(self, node: int) -> int:
        """Return the devices of a reserved node that its job leaves to others."""
        at, each = self._reserved[node]
        free = self.free[node] + sum(devices for leaves, devices in self._leaving[node] if leaves <= at)
        return max(0, free - each)

    def _leaves_at(self, attempt: JobAttempt) -> float:
        if attempt.on_loan:  # it leaves as soon as the job that it passed could begin
            return min(attempt.leaves_at, self.now + self._grace_s)
        if attempt.waits_for:
            victims = (self._attempts[victim].leaves_at for victim in attempt.waits_for if victim in self._attempts)
            return max([self.now, *victims]) + attempt.job.max_duration_s
        return attempt.leaves_at if attempt.leaves_at > self.now else self.now + _OVERDUE_S
