"""Assignment of waiting evaluations to workers. Pure: time comes from the workers, chance from the caller.

This is list scheduling (Graham, 1966): evaluations share one queue, and one is bound to a worker only when that worker
has a free slot. So a wrong estimate never strands an evaluation behind a slow worker. With any estimates, the last
evaluation ends at most one evaluation later than in the best schedule. Binding at submission to the least loaded
worker was tried: one cold start made a worker look slow for minutes.

Estimates only decide whether an evaluation takes an idle worker or waits for a faster one that will finish it sooner.
It never waits for a worker without a measurement while another is idle.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence

from .worker_score import WorkerScore


def place(
    waiting: Sequence[WorkerScore | None], workers: Sequence[WorkerScore], *, temperature: float, chance: random.Random
) -> tuple[list[int | None], float]:
    """Place waiting evaluations, oldest first, each where it should end first.

    While all workers are suspended, evaluations go to the one whose suspension ends first.

    Args:
        waiting: for each evaluation the worker that must not take it, unless it is the only one; None allows all.
        workers: at least one.
        temperature: as in `choose`.
        chance: random generator for `choose`.

    Returns:
        The index of the worker that takes each evaluation now, None for those that wait; and the seconds that one more
        evaluation would wait, infinite while all workers are suspended.
    """
    least_s = min((worker.latency_s for worker in workers if worker.is_known), default=math.inf)
    costs = [worker.cost_s(least_s) for worker in workers]
    confidences = [worker.confidence for worker in workers]  # holds for the next evaluation only
    slots = [worker.free_s() for worker in workers]
    idle = [worker.idle_slots for worker in workers]
    placed: list[int | None] = []
    for barred in waiting:
        allowed = [at for at, worker in enumerate(workers) if worker is not barred] or [0]
        ends = [slots[at][0] + costs[at] * confidences[at] for at in allowed]
        if any(idle[at] > 0 for at in allowed):
            # Nobody knows when a worker is free that has not finished an evaluation: it may still be starting.
            ends = [
                end if idle[at] > 0 or workers[at].is_known else math.inf for at, end in zip(allowed, ends, strict=True)
            ]
        if min(ends) == math.inf:
            at = min(allowed, key=lambda at: workers[at].suspended_until)
            is_now = idle[at] > 0
        else:
            at = allowed[choose(ends, temperature, chance)]
            is_now = idle[at] > 0 and slots[at][0] == 0.0
            heapq.heapreplace(slots[at], slots[at][0] + costs[at])
            confidences[at] = 1.0
        idle[at] -= is_now
        placed.append(at if is_now else None)
    return placed, min(slot[0] for slot in slots)


def choose(ends: Sequence[float], temperature: float, chance: random.Random) -> int:
    """Return the index of the smallest end, or above temperature 0 a random one by softmax(-end / temperature).

    The first of equal ends wins. At least one end must be finite.
    """
    best = min(range(len(ends)), key=ends.__getitem__)
    if temperature <= 0:
        return best
    weights = [math.exp(-(end - ends[best]) / temperature) for end in ends]
    return chance.choices(range(len(ends)), weights)[0]
