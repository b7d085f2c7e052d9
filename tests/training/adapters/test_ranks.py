"""Two ranks under the Trainers of Hugging Face and of Lightning: they agree, and none waits for one that has raised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
FAILED = "RankFailed: rank 1 failed in Breaks.on_log: OSError: disk full"


@pytest.fixture(scope="module")
def said() -> dict[str, list[Any]]:
    script = Path(__file__).with_name("rank_scenarios.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=115, check=False
    )
    lines = [each for each in done.stdout.splitlines() if each.startswith("FOUND ")]
    assert lines, done.stdout + done.stderr
    found: dict[str, list[Any]] = {}
    for scenario, rank, what in sorted(json.loads(lines[0].removeprefix("FOUND ")), key=lambda each: each[1]):
        assert rank == len(found.setdefault(scenario, []))
        found[scenario].append(what)
    return found


def test_hfs_ranks_stop_at_the_same_step_and_save(said: dict[str, list[Any]]) -> None:
    assert said["hf_stops_where_one_rank_asks"] == [[3, ["checkpoint-3"]]] * 2


def test_hfs_ranks_do_not_part_within_a_step(said: dict[str, list[Any]]) -> None:
    assert said["hf_stops_within_a_step_at_its_end"] == [[2, ["checkpoint-2"]]] * 2


def test_hfs_ranks_abort_at_the_same_step_and_save_nothing(said: dict[str, list[Any]]) -> None:
    assert said["hf_aborts_where_one_rank_asks"] == [[3, ["checkpoint-2"]]] * 2


# Pitfall 7.
def test_an_error_of_one_of_hfs_ranks_is_raised_on_all(said: dict[str, list[Any]]) -> None:
    assert said["hf_raises_on_all"] == [FAILED, "OSError: disk full"]


def test_a_log_that_one_of_hfs_ranks_makes_alone_holds_up_nobody(said: dict[str, list[Any]]) -> None:
    assert said["hf_logs_of_one_rank_hold_up_nobody"] == [[2, 0]] * 2


def test_lightnings_ranks_stop_at_the_same_step_and_save(said: dict[str, list[Any]]) -> None:
    assert said["lightning_stops_where_one_rank_asks"] == [[3, ["checkpoint-3.ckpt"]]] * 2


def test_lightnings_ranks_abort_at_the_same_step(said: dict[str, list[Any]]) -> None:
    assert said["lightning_aborts_where_one_rank_asks"] == [[3, []]] * 2


def test_an_error_of_one_of_lightnings_ranks_is_raised_on_all(said: dict[str, list[Any]]) -> None:
    assert said["lightning_raises_on_all"] == [FAILED, "OSError: disk full"]


def test_lightnings_losses_are_the_mean_of_all_ranks(said: dict[str, list[Any]]) -> None:
    (first, losses), (second, other_losses) = said["lightning_logs_the_mean_of_all_ranks"]
    assert first == second
    assert losses != other_losses
    assert first == pytest.approx([(a + b) / 2 for a, b in zip(losses, other_losses, strict=True)])
