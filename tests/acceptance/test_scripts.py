"""Users' scripts keep working: the integrations' specified samples, and the guides of the reference skyward."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.acceptance.checks import failures_of

HERE = Path(__file__).parent
SCRIPTS = ("specified_samples", "reference_guides")


def names_of(script: str) -> list[str]:
    """Read the names of a script's checks without running it.

    The script imports modules that the test process must not have.
    """
    return re.findall(r'^    "([^"]+)": \w+,', (HERE / f"{script}.py").read_text(), re.MULTILINE)


failures = cache(failures_of)
CASES = [(script, name) for script in SCRIPTS for name in names_of(script)]


@pytest.mark.timeout(600)  # the first of each script waits for all of them: about 40 s on two idle cores
@pytest.mark.parametrize(("script", "name"), CASES, ids=[f"{script}-{name}" for script, name in CASES])
def test_a_users_script_runs(script: str, name: str) -> None:
    failure = failures(script, 550)[name]
    assert failure is None, failure


def test_every_sample_and_guide_exists() -> None:
    assert [len(names_of(script)) for script in SCRIPTS] == [9, 15]
