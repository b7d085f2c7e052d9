"""Run other scripts in forks of this process, which has imported MLflow: each import takes five seconds of a core.

Each line of standard input is a script as JSON: its path, arguments, folder, environment and a file for its output. Its
exit code comes back as a line. A fork ends as a program does, so MLflow's own work at exit is done.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

import mlflow.cli
import mlflow.sklearn  # noqa: F401


def next_script() -> dict[str, Any] | None:
    """Return a script in a fork. In this process, wait for all of them, and return None in the end."""
    for line in sys.stdin:
        script: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            return script
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


script = next_script()
if script is not None:
    output = os.open(script["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    os.chdir(script["folder"])
    os.environ.update(script["environment"])
    sys.argv[:] = [script["path"], *script["arguments"]]
    runpy.run_path(script["path"], run_name="__main__")
