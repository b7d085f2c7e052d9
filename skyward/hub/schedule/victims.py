"""Choice of the jobs that make way for another one: the fewest, and of these the ones that lose the least work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest

from .room import Room
from .values import AttemptState, HubJob, JobAttempt


def choose(
    room: Room, job: HubJob, candidates: Iterable[JobAttempt]
) -> tuple[tuple[int, ...], tuple[JobAttempt, ...]] | None:
    """Choose victims among the candidates, and the nodes that the job gets in their place.

    The choice is minimal: the job would not fit if any victim stayed. Finding the fewest of all is a set cover, so two
    greedy choices are made, and the better one is taken.

    Returns:
        Nodes and victims; None if the job does not fit even if all candidates made way.
    """
    floor = _Floor(room, job, sorted(candidates, key=lambda attempt: attempt.job.id))
    if not floor.fits():
        return None
    now = room.now
    choices = [
        floor.pruned(sorted(floor.candidates, key=lambda victim: (floor.gain(victim), -victim.lost_s(now)))),
        floor.pruned(_by_node(floor, job)),
    ]
    victims = min(choices, key=lambda chosen: (len(chosen), sum(victim.lost_s(now) for victim in chosen)))
    return floor.nodes_without(victims), victims


def _by_node(floor: _Floor, job: HubJob) -> list[JobAttempt]:
    """Order the candidates: first the ones to spare, which the cheapest nodes for the job do not need."""
    wanted = {victim.job.id for node in floor.cheapest(job.shape.nodes) for victim in floor.needed_on(node)}
    spared = [victim for victim in floor.candidates if victim.job.id not in wanted]
    return spared + [victim for victim in floor.candidates if victim.job.id in wanted]


class _Floor:
    """Nodes of a set as if some of the candidates had left."""

    def __init__(self, room: Room, job: HubJob, candidates: Sequence[JobAttempt]) -> None:
        self.candidates = candidates
        self._room, self._job, self._each = room, job, job.shape.on_each(room.machines)
        ends_at = room.now + job.max_duration_s
        self._allowed = room.allowed(self._each, ends_at)
        self._free = list(room.free)
        self._on: dict[int, list[JobAttempt]] = {}
        for victim in candidates:
            for node in victim.nodes:
                self._on.setdefault(node, []).append(victim)
                self._free[node] += self._devices(victim)
        self._fitting = sum([may and free >= self._each for may, free in zip(self._allowed, self._free, strict=True)])

    def fits(self) -> bool:
        return self._fitting >= self._job.shape.nodes

    def gain(self, victim: JobAttempt) -> int:
        """Devices that the victim would free."""
        return self._devices(victim) * len(victim.nodes)

    def pruned(self, order: Sequence[JobAttempt]) -> tuple[JobAttempt, ...]:
        """Spare one candidate after the other in this order, as long as the job still fits. Returns the rest."""
        spared: list[JobAttempt] = []
        victims: list[JobAttempt] = []
        for victim in order:
            self._shift(victim, -1)
            if self.fits():
                spared.append(victim)
            else:
                self._shift(victim, +1)
                victims.append(victim)
        for victim in spared:
            self._shift(victim, +1)
        return tuple(victims)

    def cheapest(self, count: int) -> list[int]:
        """Return the nodes whose victims are the fewest and lose the least."""
        nodes = filter(self._is_enough, range(len(self._free)))
        return nsmallest(count, nodes, key=lambda node: (*self._cost(node), node))

    def needed_on(self, node: int) -> list[JobAttempt]:
        """Return the fewest candidates that must leave the node for the job to fit there."""
        needed: list[JobAttempt] = []
        free = self._room.free[node]
        for victim in sorted(self._on.get(node, ()), key=lambda victim: (-self._devices(victim), self._lost(victim))):
            if free >= self._each:
                break
            free += self._devices(victim)
            needed.append(victim)
        return needed

    def nodes_without(self, victims: Iterable[JobAttempt]) -> tuple[int, ...]:
        """Return the nodes that the job gets when these have left: those with the least over."""
        free = list(self._room.free)
        for victim in victims:
            for node in victim.nodes:
                free[node] += self._devices(victim)
        fitting = [(free[node], node) for node in range(len(free)) if self._allowed[node] and free[node] >= self._each]
        return tuple(sorted(node for _, node in nsmallest(self._job.shape.nodes, fitting)))

    def _cost(self, node: int) -> tuple[int, float]:
        needed = self.needed_on(node)
        return len(needed), sum(map(self._lost, needed))

    def _shift(self, victim: JobAttempt, sign: int) -> None:
        for node in victim.nodes:
            was_enough = self._is_enough(node)
            self._free[node] += sign * self._devices(victim)
            self._fitting += self._is_enough(node) - was_enough

    def _is_enough(self, node: int) -> bool:
        return self._allowed[node] and self._free[node] >= self._each

    def _devices(self, attempt: JobAttempt) -> int:
        return attempt.job.shape.on_each(self._room.machines)

    def _lost(self, attempt: JobAttempt) -> float:
        return attempt.lost_s(self._room.now)


def may_leave(attempt: JobAttempt) -> bool:
    """Return whether the attempt can be told to make way: its job allows it, and it is not leaving already."""
    return attempt.job.is_preemptible and attempt.state in (AttemptState.STARTING, AttemptState.RUNNING)
