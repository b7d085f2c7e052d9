"""Search for good parameters with Optuna: the nodes of a pool work on one study, which a hub keeps.

python examples/45_optuna.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import optuna

import skyward as sky
from skyward import hub
from skyward.testing.hub import HubServer

EPOCHS, TRIALS = 10, 12


def objective(trial: optuna.Trial) -> float:
    """Fit a line by gradient descent, and stop early if other trials were better."""
    rate = trial.suggest_float("rate", 1e-3, 1.0, log=True)
    rng = np.random.default_rng(7)
    x = rng.uniform(-1, 1, 200)
    y = 3 * x + 1 + rng.normal(0, 0.1, 200)
    slope = offset = loss = 0.0
    for epoch in range(EPOCHS):
        error = slope * x + offset - y
        slope -= rate * float((error * x).mean())
        offset -= rate * float(error.mean())
        loss = float((error**2).mean())
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return loss


@sky.compute
def search(study_name: str) -> int:
    """Work on the study from a node, until it has enough trials."""
    study = optuna.load_study(study_name=study_name, storage=hub.optuna_storage(), pruner=optuna.pruners.MedianPruner())
    study.optimize(objective, callbacks=[optuna.study.MaxTrialsCallback(TRIALS, states=None)])
    return len(study.trials)


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as name, HubServer(Path(name) / "hub") as server:
        # A hub of your own outlives the script: run `skyward hub up` and paste the lines that it prints.
        hub.connect(server.url, token=server.token, spool=Path(name) / "spool")
        study = optuna.create_study(study_name="rates", storage=hub.optuna_storage())
        with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
            search("rates") @ pool
        print("enough trials:", len(study.trials) >= TRIALS)
        print(f"a good rate was found: {study.best_value < 1}")


if __name__ == "__main__":
    main()
