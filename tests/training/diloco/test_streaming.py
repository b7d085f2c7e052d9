"""Streaming by hand: schedule, delta, mean, outer step and mixing together give the tables of a paper-and-pencil run.

Two workers, one parameter in each of two fragments, all zero at first. An inner step adds 1 on worker a and 3 on worker
b. H is 6, so fragment 0 is sent after steps 3, 9, ... and fragment 1 after steps 6, 12, ... The outer optimizer has
rate 0.5 and no momentum: the outer value moves half way to the mean of the workers' values.
"""

from __future__ import annotations

import pytest
import torch

from skyward.training.diloco.algorithm import OuterSGD, mix, pseudo_gradient
from skyward.training.diloco.schedule import SyncSchedule

SPEED = {"a": 1.0, "b": 3.0}
FRAGMENTS = ("p", "q")


class Worker:
    """One worker's parameters, as a training process holds them."""

    def __init__(self, name: str, delay: int) -> None:
        self.name = name
        self.schedule = SyncSchedule(sync_every=6, num_fragments=2, delay=delay)
        self.local = {name: torch.zeros(1) for name in FRAGMENTS}
        self.base = {name: torch.zeros(1) for name in FRAGMENTS}

    def step(self) -> None:
        for parameter in self.local.values():
            parameter.add_(SPEED[self.name])


def run(delay: int, alpha: float, steps: int) -> dict[str, list[float]]:
    """Return the values of each worker's parameters after each inner step, by worker and parameter."""
    workers = [Worker(name, delay) for name in SPEED]
    master, outer = {name: torch.zeros(1) for name in FRAGMENTS}, OuterSGD(lr=0.5, momentum=0.0, nesterov=False)
    table: dict[str, list[float]] = {f"{name} {worker.name}": [] for worker in workers for name in FRAGMENTS}
    for _ in range(steps):
        for worker in workers:
            worker.step()
        # Equal schedules: all workers send the same fragment after the same step.
        for action, *others in zip(*(worker.schedule.advance() for worker in workers), strict=True):
            assert others == [action]
            name = FRAGMENTS[action.fragment]
            if action.kind == "send":
                deltas = [pseudo_gradient(worker.base[name], worker.local[name]) for worker in workers]
                outer.step(master, {name: torch.stack(deltas).mean(0)})
            else:
                for worker in workers:
                    mix(worker.local[name], master[name], alpha)
                    worker.base[name] = master[name].clone()
        for worker in workers:
            for name, parameter in worker.local.items():
                table[f"{name} {worker.name}"].append(parameter.item())
    return table


# Without delay and with alpha 0, both workers have the outer value after each synchronisation.
# p, step 3: a 3, b 9, mean 6, outer 3.  Step 9: a 3+6 = 9, b 3+18 = 21, mean 15, outer 3 + 12/2 = 9.
# q, step 6: a 6, b 18, mean 12, outer 6.  Step 12: a 12, b 24, mean 18, outer 6 + 12/2 = 12.
NO_DELAY_ALPHA_0 = {
    "p a": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
    "p b": [3, 6, 3, 6, 9, 12, 15, 18, 9, 12, 15, 18],
    "q a": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
    "q b": [3, 6, 9, 12, 15, 6, 9, 12, 15, 18, 21, 12],
}
# Alpha 0.5: the value is the mean of the local and the outer value; the base is the outer value.
# p, step 3: outer 3, a (3+3)/2 = 3, b (9+3)/2 = 6.  Step 9: a 9, b 24, mean 16.5, outer 3 + 13.5/2 = 9.75,
#    a (9+9.75)/2 = 9.375, b (24+9.75)/2 = 16.875.
# q, step 6: outer 6, a 6, b 12.  Step 12: a 12, b 30, mean 21, outer 6 + 15/2 = 13.5, a 12.75, b 21.75.
NO_DELAY_ALPHA_HALF = {
    "p a": [1, 2, 3, 4, 5, 6, 7, 8, 9.375, 10.375, 11.375, 12.375],
    "p b": [3, 6, 6, 9, 12, 15, 18, 21, 16.875, 19.875, 22.875, 25.875],
    "q a": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12.75],
    "q b": [3, 6, 9, 12, 15, 12, 15, 18, 21, 24, 27, 21.75],
}
# Alpha 1: workers never take the outer value, with any delay.
ALPHA_1 = {
    "p a": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
    "p b": [3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36],
    "q a": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
    "q b": [3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36],
}
# Delay 1 and alpha 0: the outer value of step 3 replaces the values of step 4, so the inner step between is lost.
# p, step 3: outer 3, applied after step 4.  Step 9: a 3+5 = 8, b 3+15 = 18, mean 13, outer 3 + 10/2 = 8, applied
#    after step 10.
# q, step 6: outer 6, applied after step 7.  Step 12: a 11, b 21, mean 16, outer 6 + 10/2 = 11, applied after step 13.
DELAY_1_ALPHA_0 = {
    "p a": [1, 2, 3, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11],
    "p b": [3, 6, 9, 3, 6, 9, 12, 15, 18, 8, 11, 14, 17],
    "q a": [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 11],
    "q b": [3, 6, 9, 12, 15, 18, 6, 9, 12, 15, 18, 21, 11],
}
# Delay 1 and alpha 0.5.
# p, step 4: a (4+3)/2 = 3.5, b (12+3)/2 = 7.5.  Step 9: a 8.5, b 22.5, mean 15.5, outer 3 + 12.5/2 = 9.25.
#    Step 10: a (9.5+9.25)/2 = 9.375, b (25.5+9.25)/2 = 17.375.
# q, step 7: outer 6, a (7+6)/2 = 6.5, b (21+6)/2 = 13.5.  Step 12: a 11.5, b 28.5, mean 20, outer 6 + 14/2 = 13.
#    Step 13: a (12.5+13)/2 = 12.75, b (31.5+13)/2 = 22.25.
DELAY_1_ALPHA_HALF = {
    "p a": [1, 2, 3, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.375, 10.375, 11.375, 12.375],
    "p b": [3, 6, 9, 7.5, 10.5, 13.5, 16.5, 19.5, 22.5, 17.375, 20.375, 23.375, 26.375],
    "q a": [1, 2, 3, 4, 5, 6, 6.5, 7.5, 8.5, 9.5, 10.5, 11.5, 12.75],
    "q b": [3, 6, 9, 12, 15, 18, 13.5, 16.5, 19.5, 22.5, 25.5, 28.5, 22.25],
}


TABLES = [
    (0, 0.0, NO_DELAY_ALPHA_0),
    (0, 0.5, NO_DELAY_ALPHA_HALF),
    (0, 1.0, ALPHA_1),
    (1, 0.0, DELAY_1_ALPHA_0),
    (1, 0.5, DELAY_1_ALPHA_HALF),
    (1, 1.0, ALPHA_1),
]
"""Delay, alpha, and the parameters after each step."""


@pytest.mark.parametrize(("delay", "alpha", "table"), TABLES)
def test_streaming_gives_the_tables_by_hand(delay: int, alpha: float, table: dict[str, list[float]]) -> None:
    assert run(delay, alpha, len(table["p a"])) == table
