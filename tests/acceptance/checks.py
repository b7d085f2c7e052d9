"""Run checks by name in one process, and report each as a line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.few_modules import LEAN


def run_checks(checks: dict[str, Callable[[], None]], wanted: list[str]) -> None:
    """Run the checks that are named, or all, and write name, failure (None: passed) and seconds of each."""
    for name in wanted or list(checks):
        began = time.monotonic()
        try:
            checks[name]()
            failure = None
        except Exception:
            failure = traceback.format_exc()
        line = {"name": name, "failure": failure, "seconds": round(time.monotonic() - began, 1)}
        sys.stdout.write(f"{json.dumps(line)}\n")
        sys.stdout.flush()


def failures_of(module: str, timeout_s: float) -> dict[str, str | None]:
    """Run a module of checks in a separate process and return each check's failure by its name.

    One process runs all of them, because importing torch, JAX and Keras takes longer than the checks. Some examples run
    with frameworks that find everything that is installed (tests/test_examples.py).
    """
    done = subprocess.run(
        [sys.executable, "-m", f"tests.acceptance.{module}"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(LEAN)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {line["name"]: line["failure"] for line in lines}
