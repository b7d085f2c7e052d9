"""Evaluations over several workers, one of which dies: a loop of no framework trains on and waits for none of them.

python examples/32_evaluation_workers.py
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import skyward as sky
from skyward.training.evaluation import AdaptiveCompute, AsyncEvaluator

EPOCHS, EPOCH_S, EVALUATION_S = 8, 0.2, 0.3
Model = dict[str, Any]


def make_model() -> Model:
    return {}


def load(model: Model, weights: Model) -> None:
    model.update(weights)


def score(model: Model, data: tuple[Any, Any, Path | None]) -> dict[str, float]:
    images, digits, killed = data
    time.sleep(EVALUATION_S)  # a real one computes as long
    if killed is not None and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    return {"accuracy": float(((images @ model["w"]).argmax(1) == digits).mean())}


def main() -> None:
    images, digits = load_digits(return_X_y=True)
    images = images / 16
    weights: Model = {"w": np.zeros((64, 10))}
    chance = np.random.default_rng(0)

    def train(until: float) -> None:
        while time.perf_counter() < until:
            at = chance.integers(0, 1400, 64)
            scores = np.exp(images[at] @ weights["w"])
            wrong = scores / scores.sum(1, keepdims=True) - np.eye(10)[digits[at]]
            weights["w"] -= 0.5 / 64 * images[at].T @ wrong
            time.sleep(0.005)

    with (
        tempfile.TemporaryDirectory() as folder,
        sky.ComputePool(provider=sky.Local(), nodes=3, roles={"evaluation": [1, 2]}, logs=False) as pool,
        AdaptiveCompute([pool.node(1), pool.node(2), "subprocess"]) as compute,
    ):
        print("workers:", ", ".join(compute.warmup(rounds=2, timeout=60)))
        for killed in (None, Path(folder, "killed")):
            held_out = (images[1400:], digits[1400:], killed)
            with AsyncEvaluator(
                make_model, score, held_out, compute=compute, load=load, gate="always", max_pending=EPOCHS
            ) as evaluator:
                began = time.perf_counter()
                for epoch in range(1, EPOCHS + 1):
                    train(began + epoch * EPOCH_S)
                    evaluator.submit(weights, step=epoch, epoch=epoch)
                trained_s = time.perf_counter() - began
            inline_s = EPOCHS * (EPOCH_S + EVALUATION_S)
            print(f"trained for {trained_s:.1f} s; with evaluations in between it would be {inline_s:.1f} s")
            scored = [record.metrics["accuracy"] for record in evaluator.history if record.status == "ok"]
            print(f"{len(scored)} of {EPOCHS} epochs scored, the last: {scored[-1]:.2f}")
            print("evaluations that lost their worker:", sum(worker.failures for worker in compute.workers))


if __name__ == "__main__":
    main()
