"""Compare ways to search: ASHA with random search, and population based training with fixed schedules.

    .venv/bin/python benchmarks/hub_sweeps.py            # some minutes
    .venv/bin/python benchmarks/hub_sweeps.py --seeds 3 --only asha

*ASHA*: 64 random trials of a small network on scikit-learn's digits, each over 27 epochs. Then the same 64 draws with
ASHA, and up to 128 others, until one is as good as the best of those. Machine time is the time that trials held their
slots. With `--other-draws`, ASHA draws 192 others, and luck decides how soon one is as good as the best of 64.

*PBT*: a toy whose best learning rate changes five times. In each phase, only one group of parameters gets gradients,
and their curvatures differ by up to a thousand; a bound keeps parameters that diverge finite. A fixed schedule cannot
know the phases. The members of the population and 8 fixed schedules (constant, exponential, cosine, steps; all drawn by
chance) train for equally many steps. The last column is the best of 64 schedules, which is 8 times the budget.

All trials run in a pool on this machine, and all rows are in a hub in this process.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import numpy as np
import optuna

import skyward as sky
from skyward import hub
from skyward.testing.hub import HubServer

EPOCHS, TRIALS, MOST = 27, 64, 192
ASHA_TARGET = 0.5
NETWORK: dict[str, Any] = {
    "rate": {"type": "log_uniform", "min": 1e-4, "max": 3.0},
    "momentum": {"type": "uniform", "min": 0.0, "max": 0.99},
    "decay": {"type": "log_uniform", "min": 1e-6, "max": 1e-1},
    "width": {"type": "int_log_uniform", "min": 32, "max": 512},
    "batch": {"type": "choice", "values": [16, 64, 256]},
}
MEMBERS, GENERATIONS, INTERVAL = 8, 40, 4
STEPS = GENERATIONS * INTERVAL
CURVATURES = (1.0, 100.0, 0.1, 10.0, 0.3)
LIMIT = 10.0
RATE: dict[str, Any] = {"rate": {"type": "log_uniform", "min": 1e-4, "max": 30.0}}
SCHEDULE: dict[str, Any] = {
    **RATE,
    "kind": {"type": "choice", "values": ["constant", "exponential", "cosine", "steps"]},
    "last": {"type": "log_uniform", "min": 1e-3, "max": 1e3},
    "drops": {"type": "int_uniform", "min": 1, "max": 5},
}


# ASHA -----------------------------------------------------------------------------------------------------------------


def network(trial: hub.Trial) -> float:
    """Train a network with one hidden layer. Return its cross-entropy on the last third of the digits."""
    images, labels = digits()
    rng = np.random.default_rng(0)
    cut = 2 * len(images) // 3
    width, batch, classes = trial["width"], trial["batch"], 10
    weights = [
        rng.normal(0, 0.1, (64, width)),
        np.zeros(width),
        rng.normal(0, 0.1, (width, classes)),
        np.zeros(classes),
    ]
    speeds = [np.zeros_like(part) for part in weights]
    loss = math.inf
    for epoch in range(EPOCHS):
        for start in range(0, cut, batch):
            part, truth = images[start : start + batch], np.eye(classes)[labels[start : start + batch]]
            hidden = np.maximum(part @ weights[0] + weights[1], 0)
            scores = hidden @ weights[2] + weights[3]
            chances = np.exp(scores - scores.max(1, keepdims=True))
            wrong = (chances / chances.sum(1, keepdims=True) - truth) / len(part)
            back = (wrong @ weights[2].T) * (hidden > 0)
            slopes = [part.T @ back, back.sum(0), hidden.T @ wrong, wrong.sum(0)]
            for index, slope in enumerate(slopes):
                speeds[index] = trial["momentum"] * speeds[index] - trial["rate"] * (
                    slope + trial["decay"] * weights[index]
                )
                weights[index] = np.clip(weights[index] + speeds[index], -1e3, 1e3)
        hidden = np.maximum(images[cut:] @ weights[0] + weights[1], 0)
        scores = hidden @ weights[2] + weights[3]
        scores -= scores.max(1, keepdims=True)
        chances = np.take_along_axis(scores, labels[cut:, None], 1)[:, 0] - np.log(np.exp(scores).sum(1))
        loss = -float(chances.mean())
        trial.report(loss, epoch + 1)
        if trial.should_stop:
            break
    return loss


@functools.cache
def digits() -> tuple[Any, Any]:
    """Return images and labels in a random order that is always the same."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return images[order] / 16.0, labels[order]


def rows_of(sweep: hub.Sweep, client: httpx.Client) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = client.get(f"/v1/hpo/{sweep.id}/trials").raise_for_status().json()["trials"]
    return sorted(rows, key=lambda row: row["ended_us"])


def compare_asha(seed: int, asha_seed: int, pool: sky.ComputePool, client: httpx.Client) -> float:
    """Print a line for a seed, and return the ratio of the machine times."""
    whole = hub.sweep(
        network, NETWORK, name=f"random-{seed}", strategy="random", max_trials=TRIALS, seed=seed, pool=pool
    )
    random_s = sum(row["ended_us"] - row["started_us"] for row in rows_of(whole, client)) / 1e6
    best = whole.best.value or 0.0
    asha = {"type": "asha", "min_steps": 3, "reduction": 3}
    most, spent_s, count = 0, math.inf, 0
    while math.isinf(spent_s) and most < MOST:
        most += 16
        sweep = hub.sweep(
            network,
            NETWORK,
            name=f"asha-{seed}",
            strategy="random",
            pruner=asha,
            max_trials=most,
            seed=asha_seed,
            pool=pool,
        )
        rows = rows_of(sweep, client)
        reached = [row["ended_us"] for row in rows if row["state"] == "completed" and float(row["values"][0]) <= best]
        if reached:
            # All that ran until then counts, also a part of the trials that still ran.
            spent_s = sum(max(0, min(row["ended_us"], reached[0]) - row["started_us"]) for row in rows) / 1e6
            count = sum(row["started_us"] < reached[0] for row in rows)
    ratio = float(spent_s / random_s)
    print(f"{seed:>4}  {best:>8.4f}  {random_s:>12.1f}  {spent_s:>10.1f}  {count:>11}  {ratio:>6.2f}", flush=True)
    return ratio


# PBT ------------------------------------------------------------------------------------------------------------------


def descend(state: list[float], step: int, rate: float) -> None:
    """Take one step: only the group of the phase has gradients."""
    phase = step * len(CURVATURES) // STEPS
    state[phase] = max(-LIMIT, min(LIMIT, state[phase] * (1 - rate * CURVATURES[phase])))


def loss_of(state: list[float]) -> float:
    return math.log10(sum(value * value for value in state) / len(state) + 1e-12)


def member(trial: hub.Trial) -> float:
    """Train one interval of a member."""
    state = [1.0] * len(CURVATURES)
    if trial.load_from is not None:
        state = json.loads((Path(trial.load_from) / "state.json").read_text())
    assert trial.steps is not None
    for step in range(*trial.steps):
        descend(state, step, trial["rate"])
    (Path(trial.folder) / "state.json").write_text(json.dumps(state))
    return loss_of(state)


def scheduled(trial: hub.Trial) -> float:
    """Train with a fixed schedule."""
    state = [1.0] * len(CURVATURES)
    for step in range(STEPS):
        part = step / STEPS
        factor = {
            "constant": 1.0,
            "exponential": trial["last"] ** part,
            "cosine": trial["last"] + (1 - trial["last"]) * (1 + math.cos(math.pi * part)) / 2,
            "steps": trial["last"] ** (math.floor(part * (trial["drops"] + 1)) / trial["drops"]),
        }[trial["kind"]]
        descend(state, step, trial["rate"] * factor)
    return loss_of(state)


def compare_pbt(seed: int, pool: sky.ComputePool, folder: Path) -> bool:
    """Print a line for a seed, and return whether the population is better."""
    population = hub.sweep(
        member,
        RATE,
        name=f"pbt-{seed}",
        strategy="pbt",
        population={"size": MEMBERS, "generations": GENERATIONS, "ready_interval": INTERVAL, "resample": 0.5},
        checkpoint_dir=folder / f"pbt-{seed}",
        seed=seed,
        pool=pool,
    )
    last = [trial.value for trial in population.trials[-MEMBERS:] if trial.value is not None]
    many = hub.sweep(
        scheduled, SCHEDULE, name=f"fixed-{seed}", strategy="random", max_trials=8 * MEMBERS, seed=seed, pool=pool
    )
    values = [trial.value for trial in many.trials if trial.value is not None]
    fixed, wide = min(values[:MEMBERS]), min(values)
    print(f"{seed:>4}  {min(last):>10.2f}  {fixed:>10.2f}  {wide:>12.2f}", flush=True)
    return min(last) < fixed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="default: 5")
    parser.add_argument("--only", choices=["asha", "pbt"])
    parser.add_argument("--other-draws", action="store_true", help="ASHA draws other parameters than random search")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    print(
        f"{os.cpu_count()} cores of {platform.machine()}, {date.today()}, load average {os.getloadavg()[0]:.1f}\n"
        f"CPython {platform.python_version()}, Optuna {optuna.__version__}\n"
    )
    seeds = range(arguments.seeds)
    with tempfile.TemporaryDirectory() as name, HubServer(Path(name) / "hub") as server:
        hub.connect(server.url, token=server.token, spool=Path(name) / "spool")
        client = httpx.Client(base_url=server.url, headers=server.headers, timeout=60)
        with client, sky.ComputePool(provider=sky.Local(), nodes=2, logs=False, console=False) as pool:
            if arguments.only != "pbt":
                print("seed   best loss  64 random, s   ASHA, s  ASHA trials   ratio")
                ratios = [compare_asha(seed, seed + 1000 * arguments.other_draws, pool, client) for seed in seeds]
                median = statistics.median(ratios)
                verdict = "reached" if median <= ASHA_TARGET else "missed"
                print(f"median {median:.2f} of the machine time; at most {ASHA_TARGET} asked: {verdict}\n")
            if arguments.only != "asha":
                print("log10 of the last loss\nseed  population  8 schedules  64 schedules")
                wins = sum(compare_pbt(seed, pool, Path(name)) for seed in seeds)
                verdict = "reached" if wins == len(seeds) else "missed"
                print(f"better in {wins} of {len(seeds)}; each asked: {verdict}")


if __name__ == "__main__":
    main()
