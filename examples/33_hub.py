"""Remember runs in a hub: log parameters, curves and a file, then find the best run again.

python examples/33_hub.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from skyward import hub
from skyward.testing.hub import HubServer

EPOCHS = 60


def train(rate: float, folder: Path) -> None:
    """Fit a line by gradient descent, and log each epoch."""
    rng = np.random.default_rng(7)
    x = rng.uniform(-1, 1, 200)
    y = 3 * x + 1 + rng.normal(0, 0.1, 200)
    slope = offset = 0.0
    with hub.start_run(run_name=f"rate {rate}", experiment="line") as run:
        run.log_params({"rate": rate, "epochs": EPOCHS})
        for epoch in range(EPOCHS):
            error = slope * x + offset - y
            slope -= rate * float((error * x).mean())
            offset -= rate * float(error.mean())
            run.log_metrics({"loss": float((error**2).mean())}, step=epoch)
        report = folder / "fit.txt"
        report.write_text(f"y = {slope:.2f} x + {offset:.2f}\n")
        run.log_artifact("fit.txt", report)


def main() -> None:
    with tempfile.TemporaryDirectory() as name, HubServer(Path(name) / "hub") as server:
        # A hub of your own outlives the script: run `skyward hub up` and paste the lines that it prints.
        hub.connect(server.url, token=server.token, spool=Path(name) / "spool")
        for rate in (0.01, 0.1, 0.5):
            train(rate, Path(name))

        for run in hub.runs("metrics.loss < 1", order_by="metrics.loss ASC"):
            print(f"{run.name}: loss {run.metrics['loss']:.3f}, {len(run.history('loss').values)} points")
        best = hub.runs(order_by="metrics.loss ASC")[0]
        print(f"best: {best.name}, {best.download('fit.txt', to=name).read_text().strip()}")


if __name__ == "__main__":
    main()
