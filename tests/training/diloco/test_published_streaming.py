"""Streaming of torchft's published runs: schedule, delta, mean, outer step and mixing together give its parameters.

Two workers, one parameter in each of two fragments, all 1 at first. An inner step subtracts 2. H is 6, and the outer
optimizer has rate 2 and no momentum. Torchft sends a fragment `delay` steps before its turn and takes the answer at its
turn. Ours sends it at its turn. So our schedule begins `delay` steps earlier here.

Source: github.com/pytorch/torchft (BSD-3), test_fixtures/torchft.diloco_regression_test.DiLoCoMockedUpdateTest.
test_diloco_mocked_updates_0.json to _5.json. Both workers of a run have the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from skyward.training.diloco.algorithm import OuterSGD, mix, pseudo_gradient
from skyward.training.diloco.schedule import SyncSchedule

FRAGMENTS = ("p", "q")
STRAIGHT = [1.0 - 2 * step for step in range(16)]
"""A parameter that never takes the outer value."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """Numbers of one run."""

    delay: int
    alpha: float
    local: dict[str, list[float]]
    """Each parameter after 0 to 15 inner steps."""
    outer: dict[int, tuple[float, float]]
    """Outer values of both parameters after some steps."""


RUNS = [
    Published(
        delay=0,
        alpha=0.0,
        local={
            "p": [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
            "q": [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
        },
        outer={0: (1, 1), 3: (-11, 1), 6: (-11, -23), 9: (-35, -23), 12: (-35, -47)},
    ),
    Published(
        delay=0,
        alpha=0.5,
        local={
            "p": [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
            "q": [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
        },
        outer={0: (1, 1), 3: (-11, 1), 6: (-11, -23), 9: (-29, -23), 12: (-29, -35)},
    ),
    Published(
        delay=0,
        alpha=1.0,
        local={"p": STRAIGHT, "q": STRAIGHT},
        outer={0: (1, 1), 3: (-11, 1), 6: (-11, -23), 9: (-23, -23), 12: (-23, -23)},
    ),
    Published(
        delay=1,
        alpha=0.0,
        local={
            "p": [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
            "q": [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
        },
        outer={0: (1, 1), 3: (-7, 1), 6: (-7, -19), 9: (-27, -19), 12: (-27, -39), 15: (-47, -39)},
    ),
    Published(
        delay=1,
        alpha=0.5,
        local={
            "p": [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
            "q": [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
        },
        outer={0: (1, 1), 3: (-7, 1), 6: (-7, -19), 9: (-25, -19), 12: (-25, -31), 15: (-38, -31)},
    ),
    Published(
        delay=1,
        alpha=1.0,
        local={"p": STRAIGHT, "q": STRAIGHT},
        outer={0: (1, 1), 3: (-7, 1), 6: (-7, -19), 9: (-23, -19), 12: (-23, -23)},
    ),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"delay-{run.delay}-alpha-{run.alpha}")
def test_streaming_gives_the_published_parameters(run: Published) -> None:
    schedule = SyncSchedule(sync_every=6, num_fragments=2, delay=run.delay)
    outer = OuterSGD(lr=2.0, momentum=0.0, nesterov=False)
    workers = [{name: torch.ones(1) for name in FRAGMENTS} for _ in range(2)]
    master, base = ({name: torch.ones(1) for name in FRAGMENTS} for _ in range(2))
    for _ in range(run.delay):
        assert not list(schedule.advance())
    local: dict[str, list[float]] = {name: [1.0] for name in FRAGMENTS}
    outer_values = {0: (1.0, 1.0)}
    for step in range(1, 16):
        for worker in workers:
            for parameter in worker.values():
                parameter.sub_(2)
        for action in schedule.advance():
            name = FRAGMENTS[action.fragment]
            if action.kind == "send":
                deltas = [pseudo_gradient(base[name], worker[name]) for worker in workers]
                outer.step(master, {name: torch.stack(deltas).mean(0)})
            else:
                base[name] = master[name].clone()
                for worker in workers:
                    mix(worker[name], master[name], run.alpha)
        assert workers[0] == workers[1]
        for name in FRAGMENTS:
            local[name].append(workers[0][name].item())
        if step in run.outer:
            outer_values[step] = (master["p"].item(), master["q"].item())
    assert local == run.local
    assert outer_values == run.outer
