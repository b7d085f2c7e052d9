"""Evaluation beside Keras's `fit`, on three backends: each in one process, which all its tests share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.training.keras_process import found_by

pytestmark = pytest.mark.timeout(240)  # the first test of a backend waits for all its scenarios

LOSSES = (0.9, 0.5, 0.3, 0.6, 0.7, 0.8)
"""What the scenarios' evaluations give, epoch for epoch."""


@pytest.fixture(scope="module", params=["torch", "jax", pytest.param("tensorflow", marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> Any:
    found, printed = found_by(Path(__file__).with_name("evaluation_scenarios.py"), request.param)
    return {**found, "backend": request.param, "printed": printed}


def test_metrics_equal_those_of_evaluating_the_same_weights_inline(found: Any) -> None:
    rows = found["rows"]
    assert [{name: row[name] for name in ("loss", "mae")} for row in rows["history"]] == rows["inline"]
    assert [row["epoch"] for row in rows["history"]] == [0, 1, 2, 3]
    assert [row["step"] for row in rows["history"]] == [3, 6, 9, 12]
    assert {row["status"] for row in rows["history"]} == {"ok"}
    assert rows["history"][0].keys() >= {"worker_name", "elapsed_secs", "snapshot_id", "submitted_at", "started_at"}
    assert rows["best"] == min(each["loss"] for each in rows["inline"])


def test_kerass_history_has_them_at_the_evaluated_epochs(found: Any) -> None:
    inline = found["rows"]["inline"]
    assert found["rows"]["keras"] == {
        "val_loss": [each["loss"] for each in inline],
        "val_mae": [each["mae"] for each in inline],
    }


def test_training_is_the_same_as_without(found: Any) -> None:
    with_it, without = found["rows"]["losses"]
    assert with_it == without
    assert found["rows"]["is_same_training"]
    assert found["rows"]["threads"] == []


def test_a_timeline_has_a_copy_and_an_evaluation_for_each_epoch(found: Any) -> None:
    tracks = found["rows"]["tracks"]
    assert (tracks["snapshot"], tracks["transfer"], tracks["in-process"]) == (4, 4, 4)


def test_early_stopping_acts_once_for_each_result_and_restores_the_scored_weights(found: Any) -> None:
    decisions = found["decisions"]
    # The third is best. Two that are worse follow, of which the last is known when the sixth epoch ends, or at once.
    assert decisions["epochs"] in (5, 6)
    assert decisions["restored"]
    assert decisions["given_back"]
    assert decisions["keras"] == list(LOSSES[: decisions["epochs"]])


def test_the_learning_rate_is_reduced_for_each_worse_result(found: Any) -> None:
    assert found["decisions"]["rate"] == pytest.approx(0.1 * 0.5 ** (found["decisions"]["epochs"] - 3))


def test_the_best_files_have_the_scored_weights(found: Any) -> None:
    decisions = found["decisions"]
    assert decisions["best"] == [True, 0.3]
    assert decisions["record"] == 2
    assert decisions["checkpoint"]
    assert decisions["written"] == [
        *(f"{epoch}-{loss}.weights.h5" for epoch, loss in ((1, 0.9), (2, 0.5), (3, 0.3))),
        *("best.weights.h5", "best.weights.h5.json"),
    ]


def test_a_result_that_exists_when_its_epoch_ends_is_in_its_logs(found: Any) -> None:
    inline = found["inline"]
    assert inline["seen"] == inline["keras"] == [0.9, 0.5, 0.3, 0.6, 0.7]
    assert inline["restored"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("uncompiled", "model_factory: its model is not compiled, .* call model.compile"),
        ("unbuilt", "model_factory: its model has no weights yet"),
        ("other", r"differs from the trained one \(it has \(2, 5\) for weight 0, not \(2, 3\)\)"),
        ("raises", "ZeroDivisionError: division by zero"),
        ("number", r"returned float \(0.5\); return a dictionary"),
    ],
)
def test_an_evaluation_that_fails_is_a_row_and_training_goes_on(found: Any, name: str, error: str) -> None:
    import re

    status, said, is_same_training = found["failures"][name]
    assert status == "failed"
    assert re.search(error, said)
    assert is_same_training


def test_a_factory_without_an_input_is_built_like_the_trained_model(found: Any) -> None:
    assert found["failures"]["built"] == ["ok", None]


def test_a_failure_may_end_training(found: Any) -> None:
    assert "raised" in found["failures"]


def test_late_results_are_logged_and_decide_nothing(found: Any) -> None:
    ages = found["ages"]
    assert sorted(ages["status"]) == [[0, "late", None], [1, "skipped", True], [2, "skipped", True], [3, "ok", None]]
    assert ages["keras"] == [0.5, None, None, 0.5]
    assert ages["best"] == ages["stop_best"] == 0.5


def test_our_loggers_get_it_at_the_evaluated_step(found: Any) -> None:
    assert found["others"]["records"] == [[6, 2.0, 0.9], [12, 4.0, 0.5]]


def test_unknown_metrics_and_double_validation_are_reported(found: Any) -> None:
    monitor, twice = found["others"]["said"]
    assert monitor == "EarlyStopping monitors 'val_accuracy', but val_fn returned only val_loss"
    assert twice.startswith("fit(validation_data=...) makes Keras evaluate too")
    assert found["others"]["keras"] == 2


def test_tensorboard_has_it_at_the_evaluated_epoch(found: Any) -> None:
    if found["backend"] != "tensorflow":
        assert found["tensorboard"] is None  # Keras's needs TensorFlow
        return
    assert found["tensorboard"] == [[0, 0.9], [1, 0.5], [2, 0.3]]


def test_in_another_process_it_is_the_same(found: Any) -> None:
    if found["backend"] != "jax":
        assert found["elsewhere"] is None  # one process more is enough
        return
    first, second = found["elsewhere"]["rows"]
    assert {name: first[name] for name in ("loss", "mae")} == found["elsewhere"]["inline"]
    assert [first["worker"], second["status"]] == ["subprocess", "ok"]
    assert f"Epoch 1: val_loss {first['loss']:.4g}, val_mae {first['mae']:.4g} (subprocess, " in found["printed"]
    assert not math.isnan(second["loss"])


def test_ranks_decide_alike_restore_alike_and_hear_of_errors_alike(found: Any) -> None:
    if found["backend"] != "torch":
        assert found["ranks"] is None  # theirs is the process group that we know
        return
    (first, error), (second, other_error) = found["ranks"]
    epochs, is_restored, told = first
    assert first == second
    assert (epochs in (5, 6), is_restored) == (True, True)
    assert told == [[at, loss] for at, loss in enumerate(LOSSES[:epochs])]
    assert error == "ZeroDivisionError: division by zero"
    assert other_error == (
        "RankFailed: rank 0: failed in SakuraKerasCallback (ZeroDivisionError: division by zero); "
        "read its own error there"
    )
