"""Keras in a separate process, because its backend is chosen once per process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.few_modules import LEAN

ROOT = Path(__file__).parents[2]
# Keras 3.15 passes numpy 2 deprecated arguments.
WARNINGS = ("-W", "error", "-W", "ignore:__array__ implementation:DeprecationWarning")


def found_by(script: str | Path, backend: str) -> tuple[Any, str]:
    """Run a script that prints FOUND and JSON. Returns that JSON, and all output.

    Keras is that of `LEAN`, which imports less. Examples 22 and 34 run it with all that is installed.
    """
    path = os.pathsep.join(map(str, [LEAN, ROOT]))
    chosen = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": backend}
    command = [sys.executable, *WARNINGS, script]
    environment = {**os.environ, **chosen}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (each for each in done.stdout.splitlines() if each.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND ")), done.stdout
