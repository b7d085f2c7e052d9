"""Decision how many nodes a pool should have: a pure function of what waits, what is idle, time and money.

A new node has to pay: it costs `start_s` before its first call, and is billed for `minimum_billed_s` at least. So a
pool grows only if its calls are expected to wait for longer than that. Two estimates are made, and the longer counts:

- the mean duration of a call times the calls that wait for each slot. If no call has ended for a while, a call takes
  at least that long, which covers the first calls of a pool and calls that are longer than the ones before;
- the time for which calls have been waiting without a pause. A map sends only some of its calls ahead, so the queue
  does not show what is left of it, but it has waited for `n` seconds and will probably go on for as long.

A pool keeps the most nodes that it needed at once during the last `idle_s` seconds. The idle time of a single node
would not do: calls are spread over all nodes, so a trickle of short calls would keep every node awake.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field

from ..core.records import dataclass

REFUSAL_S = 120.0
"""Seconds for which a pool remembers that it got no further nodes."""
_NEVER = math.inf


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Work of a pool at one moment, as its scheduler sees it.

    Args:
        loads: Node that is there -> its slots in use, or as many as its calls leave no resources for.
        used: Nodes that a gang, or a call to that very node, occupies.
        waiting: Slots for the calls that wait for any node; calls with numbers count as the slots they leave empty.
        named: Nodes that are not there and that waiting calls name.
        known: Nodes that are there, or may come.
        mean_s: Mean duration of a call, in seconds; None before one has ended.

    Example:
        >>> Demand(loads={0: 1, 1: 0}, waiting=0).needed(slots=1)
        1
    """

    loads: Mapping[int, int]
    used: frozenset[int] = frozenset()
    waiting: int = 0
    named: frozenset[int] = frozenset()
    known: frozenset[int] = frozenset()
    mean_s: float | None = None

    @property
    def busy(self) -> int:
        """Number of slots in use."""
        return sum(self.loads.values())

    def needed(self, slots: int) -> int:
        """Return how many nodes of `slots` slots the work takes at once."""
        plain = sum(load for node, load in self.loads.items() if node not in self.used)
        return len(self.used) + len(self.named) + math.ceil((plain + self.waiting) / slots)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of a pool's size, in nodes and in money.

    Args:
        least: Fewest nodes of a pool in use.
        most: Most nodes.
        at_rest: Nodes of a pool that nobody uses.
        start: Nodes that a pool without any begins with.
        slots: Slots of a node.
        idle_s: Seconds after which a node, or the pool, counts as idle; infinite for never.
        start_s: Seconds from the decision to a node's first call.
        minimum_billed_s: Shortest time that a node is billed for, in seconds.
        node_usd_per_hour: Price of one more node.
        most_usd_per_hour: Highest price of all nodes together.
    """

    least: int
    most: int
    at_rest: int
    start: int
    slots: int = 1
    idle_s: float = _NEVER
    start_s: float = 0.0
    minimum_billed_s: float = 0.0
    node_usd_per_hour: float = 0.0
    most_usd_per_hour: float = _NEVER

    @property
    def pays_s(self) -> float:
        """Time in use after which a new node was worth its start, in seconds."""
        return max(self.start_s, self.minimum_billed_s)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Situation of a pool when it decides. Times are in seconds up to now.

    Args:
        nodes: Nodes that are there.
        waiting: Places of calls that wait for a slot of any node.
        mean_s: Mean duration of a call; None before one has ended.
        peak: Most nodes that the work took at once during the last `idle_s` seconds.
        quiet_s: Time since a call ended.
        pressed_s: Time for which calls have been waiting without a pause.
        idle_s: Time since the pool had a call, or held anything for its user.
        youngest_s: Age of the youngest node.
        refused_s: Time since the pool was refused further nodes; infinite if it never was.
        left_usd: Rest of the budget.
    """

    nodes: int
    waiting: int = 0
    mean_s: float | None = None
    peak: int = 0
    quiet_s: float = 0.0
    pressed_s: float = 0.0
    idle_s: float = 0.0
    youngest_s: float = _NEVER
    refused_s: float = _NEVER
    left_usd: float = _NEVER


@dataclass(frozen=True, kw_only=True)
class Size:
    """Decision: how many nodes the pool should have, and why in words. `is_bound`: money allows no more nodes."""

    nodes: int
    why: str = field(default="", compare=False)
    is_bound: bool = field(default=False, compare=False)


def decide(now: Situation, bounds: Bounds) -> Size:
    """Decide how many nodes a pool should have.

    Nodes above the decision are given back once they are idle; until then the decision may change.

    Example:
        >>> bounds = Bounds(least=1, most=8, at_rest=1, start=1, start_s=60.0, idle_s=300.0)
        >>> decide(Situation(nodes=1, waiting=4, mean_s=90.0), bounds).nodes
        5
        >>> decide(Situation(nodes=5, peak=2), bounds).nodes
        2
    """
    if now.waiting:
        return _grown(now, bounds)
    if now.nodes > bounds.most:
        return Size(nodes=bounds.most, why=f"at most {bounds.most} are wanted")
    if now.youngest_s < bounds.minimum_billed_s:
        return Size(nodes=now.nodes)  # giving it back earlier saves nothing
    if now.idle_s >= bounds.idle_s:
        return Size(nodes=min(now.nodes, bounds.at_rest), why=f"idle for {bounds.idle_s:g} s")
    wanted = max(bounds.least, now.peak)
    if wanted < now.nodes and now.youngest_s >= bounds.idle_s:
        return Size(nodes=wanted, why=f"{wanted} sufficed for the last {bounds.idle_s:g} s")
    return Size(nodes=now.nodes)


def _grown(now: Situation, bounds: Bounds) -> Size:
    why = f"{now.waiting} {'call waits' if now.waiting == 1 else 'calls wait'}"
    if not now.nodes:  # money is no reason to stay without any: if it does not suffice, the launch says so
        return Size(nodes=min(max(1, bounds.start, bounds.least), bounds.most), why=why)
    if now.nodes >= bounds.most:
        return Size(nodes=bounds.most, why=f"at most {bounds.most} are wanted")
    if now.refused_s < REFUSAL_S:
        return Size(nodes=now.nodes)
    wanted = max(bounds.least, _worth(now, bounds))
    if wanted <= now.nodes:
        return Size(nodes=now.nodes)
    paid = min(wanted, _affordable(now, bounds))
    return Size(nodes=max(now.nodes, paid), why=why, is_bound=paid <= now.nodes)


def _worth(now: Situation, bounds: Bounds) -> int:
    """Return the number of nodes of which each one still pays."""
    slots = now.nodes * bounds.slots
    call_s = max(now.mean_s or 0.0, now.quiet_s)
    expected_s = max(call_s * now.waiting / slots, now.pressed_s)
    if expected_s < bounds.pays_s:
        return now.nodes
    useful = now.nodes + math.ceil(now.waiting / bounds.slots)
    worth = now.nodes * expected_s / bounds.pays_s if bounds.pays_s else _NEVER
    by_time = useful if worth >= useful else math.ceil(worth)
    return min(bounds.most, useful, max(by_time, now.nodes + 1))


def _affordable(now: Situation, bounds: Bounds) -> int:
    """Return the number of nodes that may run by the hour, and that the budget carries until a new one has paid."""
    price = bounds.node_usd_per_hour
    if not price:
        return bounds.most
    by_hour = bounds.most_usd_per_hour / price
    until_paid_usd = price * bounds.pays_s / 3600
    by_budget = now.left_usd / until_paid_usd if until_paid_usd else _NEVER
    return int(min(bounds.most, by_hour + 1e-9, max(0.0, by_budget)))
