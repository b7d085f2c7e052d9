"""A process that logs until it is killed: python -m tests.hub.client.writer [RUN_ID]. It prints each logged step."""

from __future__ import annotations

import os
import sys

from skyward import hub


def main(resume: str | None = None) -> None:
    run = hub.start_run(run_name="killed", resume=resume)
    os.write(1, f"{run.id}\n".encode())
    for step in range(1_000_000):
        run.log_metrics({"loss": 1 / (step + 1), "long": step * 1.000001}, step=step)
        os.write(1, b"%d\n" % step)


if __name__ == "__main__":
    main(*sys.argv[1:])
