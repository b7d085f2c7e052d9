"""The demo, as a newcomer runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIMIT_S = 180
"""What a newcomer is promised, on 2 cores."""


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 30)
def test_the_demo_shows_all_of_its_parts_in_time() -> None:
    done = subprocess.run(
        [sys.executable, "examples/demo.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from node 0 of 2" in done.stdout
    assert "from node 1 of 2" in done.stdout
    assert len(re.findall(r"node 0, rank 0 \| epoch +\d+  loss \d", done.stdout)) == 12
    assert re.search(r"test accuracy 0\.9[5-9]\d on 2 ranks", done.stdout)
    assert "best_params_ equal those" in done.stdout
    assert "cv_results_, all but the times, equal those" in done.stdout
    assert re.search(r"\d+/105 fits", done.stderr)
