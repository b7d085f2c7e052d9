"""Search for good parameters: trials are calls to a pool, and those that are worse than others end early.

python examples/47_sweep.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import skyward as sky
from skyward import hub
from skyward.testing.hub import HubServer

EPOCHS = 9
SPACE = {
    "rate": {"type": "log_uniform", "min": 1e-3, "max": 1.0},
    "momentum": {"type": "choice", "values": [0.0, 0.5, 0.9]},
}


def objective(trial: hub.Trial) -> float:
    """Fit a line by gradient descent, and stop when the sweep says so."""
    rng = np.random.default_rng(7)
    x = rng.uniform(-1, 1, 200)
    y = 3 * x + 1 + rng.normal(0, 0.1, 200)
    weights, speed, loss = np.zeros(2), np.zeros(2), 0.0
    for epoch in range(EPOCHS):
        error = weights[0] * x + weights[1] - y
        speed = trial["momentum"] * speed - trial["rate"] * np.array([(error * x).mean(), error.mean()])
        weights += speed
        loss = float((error**2).mean())
        trial.report(loss, epoch)
        if trial.should_stop:
            break
    return loss


def main() -> None:
    with tempfile.TemporaryDirectory() as name, HubServer(Path(name) / "hub") as server:
        # A hub of your own outlives the script: run `skyward hub up` and paste the lines that it prints.
        hub.connect(server.url, token=server.token, spool=Path(name) / "spool")
        with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
            sweep = hub.sweep(
                objective,
                SPACE,
                name="lines",
                metric="loss",
                strategy="bayesian",
                pruner={"type": "asha", "min_steps": 1, "reduction": 3},
                max_trials=16,
                seed=0,
                pool=pool,
            )
        print(f"{len(sweep.trials)} trials, {sweep.status}")
        print("some were pruned:", any(trial.state == "pruned" for trial in sweep.trials))
        best = sweep.best
        print(f"the best has a loss below 0.2: {best.value is not None and best.value < 0.2}")
        print("its run has", hub.run(str(best.run)).params.keys() & SPACE.keys() == SPACE.keys() and "its parameters")


if __name__ == "__main__":
    main()
