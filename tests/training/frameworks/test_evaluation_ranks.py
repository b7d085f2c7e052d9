"""Two ranks under the Trainers of Hugging Face and of Lightning: rank 0 sends, all gather, and all know the results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.checkpoint.crew import Said

pytestmark = pytest.mark.timeout(240)  # the first test waits for all cases of both folders

ROOT = Path(__file__).parents[3]
FAILED = "RankFailed: rank 0: failed in SakuraHFCallback (ZeroDivisionError: no rows); read its own error there"


@pytest.fixture
def said(said_under_trainers: Said) -> Said:
    return said_under_trainers


@pytest.mark.parametrize("scenario", ["hf_ddp", "hf_fsdp2"])
def test_under_hf_all_ranks_know_the_scores_of_an_inline_evaluation_by_rank_0(scenario: str, said: Said) -> None:
    (logged, inline, history), (others_logged, _, others_history) = said[scenario]
    assert history == others_history == inline
    assert logged == others_logged == [[6 * (epoch + 1), loss] for epoch, loss in enumerate(inline)]
    assert len(set(inline)) == 3


def test_sharded_training_gives_the_same_scores_as_replicated(said: Said) -> None:
    assert said["hf_fsdp2"][0][2] == pytest.approx(said["hf_ddp"][0][2])


def test_a_skipped_evaluation_of_sharded_weights_gathers_nothing(said: Said) -> None:
    assert said["hf_fsdp2_skips"] == [[[6, "ok"], [12, "skipped"], [18, "ok"]]] * 2


def test_hfs_ranks_stop_early_at_the_same_step_and_load_the_same_best(said: Said) -> None:
    assert said["hf_stops_early"] == [[24, 0.2, "checkpoint-12"]] * 2


# Pitfall 7.
def test_an_evaluation_that_fails_is_raised_on_all_ranks(said: Said) -> None:
    assert said["hf_raises_what_failed_beside_on_all"] == ["ZeroDivisionError: no rows", FAILED]


def test_under_lightning_all_ranks_know_the_scores_of_an_inline_evaluation_by_rank_0(said: Said) -> None:
    (history, inline, (loss, square), best), (others_history, _, others, others_best) = said["lightning_ddp"]
    assert history == others_history == inline
    assert [loss, square] == others == [pytest.approx(inline[-1]), pytest.approx(0.035)]
    assert best == others_best == 18
    (sharded, inline, *_), (others_sharded, *_) = said["lightning_fsdp2"]
    assert sharded == others_sharded == inline


def test_lightnings_ranks_stop_early_at_the_same_step(said: Said) -> None:
    assert said["lightning_stops_early"] == [6, 6]


def test_importing_the_names_imports_no_framework() -> None:
    code = (
        "import sys; from skyward.training.sakura import SakuraTrainer, AsyncTrainer; import skyward.training.sakura;"
        "print({'torch', 'transformers', 'lightning', 'keras', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"
