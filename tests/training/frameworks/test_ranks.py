"""Two ranks under the Trainers of Hugging Face and of Lightning: they agree, and none waits for one that has raised."""

from __future__ import annotations

import pytest

from tests.training.checkpoint.crew import Said

pytestmark = pytest.mark.timeout(240)  # the first test waits for all cases of both folders

FAILED = "RankFailed: rank 1: failed in Breaks.on_log (OSError: disk full); read its own error there"


@pytest.fixture
def said(said_under_trainers: Said) -> Said:
    return said_under_trainers


def test_hfs_ranks_stop_at_the_same_step_and_save(said: Said) -> None:
    assert said["hf_stops_where_one_rank_asks"] == [[3, ["checkpoint-3"]]] * 2


def test_hfs_ranks_do_not_part_within_a_step(said: Said) -> None:
    assert said["hf_stops_within_a_step_at_its_end"] == [[2, ["checkpoint-2"]]] * 2


def test_hfs_ranks_abort_at_the_same_step_and_save_nothing(said: Said) -> None:
    assert said["hf_aborts_where_one_rank_asks"] == [[3, ["checkpoint-2"]]] * 2


# Pitfall 7.
def test_an_error_of_one_of_hfs_ranks_is_raised_on_all(said: Said) -> None:
    assert said["hf_raises_on_all"] == [FAILED, "OSError: disk full"]


def test_a_log_that_one_of_hfs_ranks_makes_alone_delays_nobody(said: Said) -> None:
    assert said["hf_logs_of_one_rank_hold_up_nobody"] == [[2, 0]] * 2


def test_all_of_hfs_ranks_learn_that_one_has_no_loss(said: Said) -> None:
    assert said["hf_tells_all_ranks_that_one_has_no_loss"] == [[3, [False, False, True]]] * 2


def test_lightnings_ranks_stop_at_the_same_step_and_save(said: Said) -> None:
    assert said["lightning_stops_where_one_rank_asks"] == [[3, ["checkpoint-3.ckpt"]]] * 2


def test_lightnings_ranks_abort_at_the_same_step(said: Said) -> None:
    assert said["lightning_aborts_where_one_rank_asks"] == [[3, []]] * 2


def test_an_error_of_one_of_lightnings_ranks_is_raised_on_all(said: Said) -> None:
    assert said["lightning_raises_on_all"] == [FAILED, "OSError: disk full"]


def test_lightnings_losses_are_the_mean_of_all_ranks(said: Said) -> None:
    (first, losses), (second, other_losses) = said["lightning_logs_the_mean_of_all_ranks"]
    assert first == second
    assert losses != other_losses
    assert first == pytest.approx([(a + b) / 2 for a, b in zip(losses, other_losses, strict=True)])
