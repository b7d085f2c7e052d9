"""The pure modules load without a framework, and their examples run."""

from __future__ import annotations

import subprocess
import sys

from skyward.training.diloco import algorithm, async_rounds, dealing, guard, rounds, schedule
from tests.doctests import run_examples


def test_no_framework_is_loaded() -> None:
    """A server on another machine, and a program that only watches one, load no torch."""
    modules = ", ".join(module.__name__ for module in (algorithm, async_rounds, dealing, guard, rounds, schedule))
    code = f"import sys, {modules}; print({{'torch', 'numpy'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_examples_run() -> None:
    assert sum(run_examples(module) for module in (algorithm, async_rounds, dealing, guard, rounds, schedule)) > 10


def test_a_machine_without_numpy_is_told_when_the_worker_is_imported() -> None:
    """torch installs without numpy, and would fail at the first frame."""
    code = "import sys; sys.modules['numpy'] = None; from skyward.training.diloco import DiLoCoWorker"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "DiLoCoWorker: requires numpy, which is not installed here; pip install 'skyward[diloco]'" in done.stderr
