"""Fixtures that several folders share."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.checkpoint.crew import Said, run_cases


@pytest.fixture(scope="session")
def said_under_trainers(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Return the reports of two ranks about callbacks and evaluations under Hugging Face's and Lightning's Trainers.

    They are shared, because importing the frameworks takes longer than most tests.

    Lightning reads the variables that torchrun would have set. The group itself meets at a file.
    """
    from tests.training.frameworks import evaluation_rank_cases, rank_cases

    def environment(rank: int) -> dict[str, str]:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
        meeting = {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
        return {name: str(value) for name, value in (place | meeting).items()}

    folder = tmp_path_factory.mktemp("trainers")
    return run_cases([*rank_cases.CASES, *evaluation_rank_cases.CASES], world=2, folder=folder, environment=environment)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)
