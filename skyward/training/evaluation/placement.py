"""Which worker takes which waiting evaluation. Pure: the clock is the workers', chance is given.

List scheduling (Graham, 1966): evaluations wait in one line, and an evaluation is bound to a worker only when that
worker has a free slot. So a wrong estimate never strands an evaluation behind a slow worker, and all are done at most
one evaluation later than in the best schedule, whatever the estimates say. Binding at submission, each evaluation to
the least loaded worker, was tried: one cold start made a worker look slow for minutes.

Estimates decide only whether an evaluation takes an idle worker or waits for a faster one that will end it sooner.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence

from .worker_score import WorkerScore

__all__ = ["choose", "place"]


def place(
    waiting: Sequence[WorkerScore | None], workers: Sequence[WorkerScore], *, temperature: float, chance: random.Random
) -> tuple[list[int | None], float]:
    """Place waiting evaluations, the oldest first, each where it is expected to end first.

    While all workers are suspended, evaluations go to the one whose suspension ends first.

    Args:
        waiting: for each evaluation the worker that must not take it, unless it is the only one; None: any may.
        workers: at least one.
        temperature: as `choose`'s.

    Returns: for each evaluation the index of the worker that takes it now, or None where it waits; and the seconds that
        one more evaluation would wait, infinite while all workers are suspended.
    """
    least_s = min((worker.latency_s for worker in workers if worker.is_known), default=math.inf)
    costs = [worker.cost_s(least_s) for worker in workers]
    confidences = [worker.confidence for worker in workers]  # of the next evaluation only: what waits behind it waits
    slots = [worker.free_s() for worker in workers]
    idle = [worker.idle_slots for worker in workers]
    placed: list[int | None] = []
    for barred in waiting:
        allowed = [at for at, worker in enumerate(workers) if worker is not barred] or [0]
        ends = [slots[at][0] + costs[at] * confidences[at] for at in allowed]
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
    """Choose the least, the first of equals; above a temperature of 0 at random, by softmax(-end / temperature).

    At least one must be finite.
    """
    best = min(range(len(ends)), key=ends.__getitem__)
    if temperature <= 0:
        return best
    weights = [math.exp(-(end - ends[best]) / temperature) for end in ends]
    return chance.choices(range(len(ends)), weights)[0]
