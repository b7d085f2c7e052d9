"""Hand calls to a hub as jobs, and collect their values from any process: this one, or another one next week.

python examples/46_hub_jobs.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import skyward as sky
from skyward import hub


@sky.compute
def train(rate: float) -> float:
    """Fit a line by gradient descent, and return its slope."""
    rng = np.random.default_rng(7)
    x = rng.uniform(-1, 1, 200)
    y = 3 * x + rng.normal(0, 0.1, 200)
    slope = 0.0
    for step in range(100):
        slope -= rate * float(((slope * x - y) * x).mean())
        if step % 50 == 0:
            print(f"step {step}: slope {slope:.2f}")
    return slope


@sky.compute
def fail() -> None:
    raise ValueError("rate=9: too high; lower it")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        # A hub of your own outlives the script: run `skyward hub up` and paste the lines that it prints.
        command = [sys.executable, "-m", "skyward", "hub", "up", "--data", f"{name}/hub", "--port", "0", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            try:
                assert server.stdout is not None
                started = json.loads(server.stdout.readline())
                hub.connect(started["url"], token=started["token"], spool=Path(name) / "spool")
                show()
            finally:
                server.terminate()


def show() -> None:
    submitted = hub.submit(train(1.0), name="line", max_duration_s=600)
    broken = hub.submit(fail())
    held = hub.submit(train(0.5), hold=True)

    # The id is all that another process needs.
    job = hub.job(submitted.id)
    for line in job.logs():
        print(line)
    print(f"slope {job.result(60):.1f}, attempts: {[attempt.end for attempt in job.attempts]}")
    print("the other one failed:", repr(broken.exception(60)))
    print(f"{held.status}: {held.why_waiting}")
    held.cancel()
    print(sorted(job.status for job in hub.jobs()))


if __name__ == "__main__":
    main()
