"""joblib's own tests of its process backend, with a pool in the place of that backend."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import joblib
import pytest

HERE = Path(__file__).parent
THEIRS = Path(joblib.__file__).parent / "test" / "test_parallel.py"

# Tests by name that cannot pass for another backend, and why.
NOT_OURS = {
    "test_backend_context_manager": "compares with the class LokyBackend",
    "test_nested_backend_context_manager": "compares with the class ThreadingBackend; ours is a kind of it",
    "test_nested_parallelism_limit": "compares with names of classes",
    "test_nested_backend_in_sequential": "n_jobs=None is one job for loky, every slot for us",
    "test_error_capture": "looks into loky's executor",
    "test_initializer": "loky's initializer; a pool has its own",
    "test_dispatch_multiprocessing": "sends a multiprocessing.Manager, which knows its own children only",
    "test_multiple_generator_call_separated_gc": "demands an error of loky's that does not happen here",
    "test_nested_parallel_warnings": "warnings of loky's when it is nested",
    "multiprocessing-loky": "a fork of the client has no pool",
    "memmap": "files that loky makes of arrays",
    "kill": "loky's recovery of killed workers",
}


@pytest.mark.slow
@pytest.mark.joblib_behaviours
@pytest.mark.skipif(not THEIRS.exists(), reason="this joblib comes without its tests")
def test_joblibs_own_tests_of_a_process_backend_pass(tmp_path: Path) -> None:
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\nmarkers =\n    thread_unsafe\n    parallel_threads\n    no_cover\n")
    wanted = " and ".join(["loky", *(f"not {name}" for name in NOT_OURS)])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-c", settings, "--rootdir", tmp_path, "-p", "no:cacheprovider"),
            *("-p", "instead_of_loky", "--timeout", "200", "-k", wanted, THEIRS),
            *("-p", "no:schemathesis", "--assert=plain"),  # fewer imports, and no rewritten copies of large files
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent.parent)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 100, done.stdout
