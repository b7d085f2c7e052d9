"""skyward's callbacks in the real `fit` of Keras, on three backends: each in one process, which all its tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.keras_process import found_by

pytestmark = pytest.mark.timeout(240)  # the first test of a backend waits for all its scenarios


@pytest.fixture(scope="module", params=["jax", "torch", pytest.param("tensorflow", marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> Any:
    found, _ = found_by(Path(__file__).with_name("callback_scenarios.py"), request.param)
    return {**found, "backend": request.param}


def test_events_come_in_our_order(found: Any) -> None:
    def step(number: int, *after: str) -> list[list[Any]]:
        began = ["on_step_begin", "on_train_metrics"]
        return [*([name, number - 1] for name in began), *([name, number] for name in ("on_step_end", *after))]

    logged = ("on_log_step", "on_log")
    assert found["events"]["events"] == [
        *([name, 0] for name in ("on_init_end", "on_train_begin", "on_epoch_begin")),
        *step(1),
        *step(2, *logged),
        *step(3),
        *step(4, *logged),
        *step(5),
        *([name, 5] for name in [*["on_prediction_step"] * 5, "on_evaluate", "on_epoch_end", "on_log", "on_train_end"]),
    ]


def test_state_and_arguments_are_kerass(found: Any) -> None:
    assert found["events"]["epochs"] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert found["events"]["max_steps"] == 5
    assert found["events"]["is_model"]
    assert found["events"]["metrics"] == ["epoch", "eval_loss", "eval_mae", "eval_runtime"]


def test_evaluate_and_predict_alone_are_reported(found: Any) -> None:
    assert found["events"]["alone"] == ["on_prediction_step", "on_evaluate", "on_prediction_step", "on_predict"]
    assert found["events"]["alone_metrics"] == ["eval_loss", "eval_mae", "eval_runtime"]


# Pitfall 6: running means, executions of several steps, and JAX's weights.
def test_losses_are_those_of_the_steps_not_means_since_the_epoch_began(found: Any) -> None:
    losses = found["losses"]
    assert losses["every"][:-1] == pytest.approx(losses["true"] * 2, rel=1e-4)
    assert losses["third"][:-1] == pytest.approx(losses["true_third"], rel=1e-4)  # one goes over an epoch's end
    assert [each["loss"] for each in losses["epoch"][:-1]] == pytest.approx([losses["true_epoch"]] * 2, rel=1e-4)
    assert losses["epoch"][0].keys() == {"loss", "learning_rate", "mae", "epoch"}
    assert losses["epoch"][-1]["train_loss"] == pytest.approx(losses["true_epoch"], rel=1e-4)
    # On JAX a smaller last batch counts as a whole one here, see the adapter.
    whole = 4 if found["backend"] == "jax" else 5
    assert losses["steps"][:whole] == pytest.approx(losses["true"][:whole], rel=1e-4)


def test_a_loss_that_is_no_number_ends_a_diverging_run(found: Any) -> None:
    assert found["diverges"]["iterations"] == 4
    assert found["diverges"]["losses"][1] == "nan"


def test_executions_of_several_steps_count_as_several(found: Any) -> None:
    if found["backend"] == "torch":
        assert found["executions"] is None  # Keras refuses them there
        return
    assert found["executions"]["events"] == [
        *(["on_step_begin", 0], ["on_step_end", 2], ["on_log", 2]),
        *(["on_step_begin", 2], ["on_step_end", 4], ["on_log", 4]),
        *(["on_step_begin", 4], ["on_step_end", 5], ["on_log", 5]),
    ]
    assert found["executions"]["iterations"] == 5


def test_weights_are_in_the_model_when_something_is_logged(found: Any) -> None:
    seen = found["weights"]
    assert len(set(seen[:5])) == 5
    assert sorted(seen) == seen  # they go from 0 to 2
    assert seen[-1] == seen[-2]


def test_accumulated_batches_are_one_step(found: Any) -> None:
    step = found["accumulation"]["events"]
    assert [at for name, at in step if name == "on_step_end"] == [1, 2, 3, 4, 5]
    assert step[:3] == [["on_step_begin", 0], ["on_substep_end", 0], ["on_step_end", 1]]
    assert [at for name, at in step if name == "on_epoch_end"] == [2, 5]  # five batches each: a step is in both
    assert found["accumulation"]["iterations"] == 5


def test_a_second_fit_continues_to_count_at_the_optimizers_step(found: Any) -> None:
    assert [at for name, at in found["second"]["events"] if name == "on_train_begin"] == [0, 5]
    assert [at for name, at in found["second"]["events"] if name == "on_step_end"] == list(range(1, 11))
    assert found["second"]["max_steps"] == 10


ENDS = {"on_step_end": 3, "on_log": 4, "on_evaluate": 5, "on_epoch_end": 5}


def test_a_stop_saves_and_ends(found: Any) -> None:
    for event, ended in found["stop"].items():
        step = ENDS[event]
        assert ended["files"] == [f"checkpoint-{step}.state.json", f"checkpoint-{step}.weights.h5"], event
        assert ended["iterations"] == step
        assert ended["events"].count(["on_save", step]) == 1
        assert ended["events"][-1] == ["on_train_end", step]


def test_an_abort_saves_and_reports_nothing_more(found: Any) -> None:
    for event, ended in found["abort"].items():
        step = ENDS[event]
        assert ended["files"] == [], event
        assert ended["iterations"] == step
        evaluated = [["on_evaluate", 5]] if step == 5 else []
        assert [each for each in ended["events"] if each[0] != "on_step_end"] == [*evaluated, ["on_train_end", step]]


def test_flags_are_obeyed_and_unsupported_ones_are_reported_once(found: Any) -> None:
    assert found["flags"]["events"] == [
        *(["on_save", 2], ["on_log_step", 3], ["on_log", 3], ["on_epoch_end", 5], ["on_log_step", 5], ["on_log", 5]),
        ["on_log", 5],  # of the run
    ]
    assert found["flags"]["saved"] == ["checkpoint-2.weights.h5"]
    assert [each.partition(":")[0] for each in found["flags"]["said"]] == [
        "Recorder is never called here",
        "should_epoch_stop ignored",
        "should_evaluate ignored",
    ]


def test_a_checkpoint_whose_weights_are_nan_is_skipped(found: Any) -> None:
    went = found["passes over"]
    assert went["saved"] == ["checkpoint-2.weights.h5", "checkpoint-3.weights.h5"]
    assert went["begun"] == [["on_train_begin", 2]]
    assert went["sane"], "it is no NaN"


def test_a_run_is_resumed_with_its_callbacks(found: Any) -> None:
    resumed = found["resume"]
    assert resumed["events"][0] == ["on_train_begin", 7]
    assert resumed["is_same_weight"]
    assert resumed["epochs"] == [1.0, 2.0]  # Keras begins the epoch that was not finished
    assert resumed["events"][-1] == ["on_step_end", 17]
    assert resumed["max_steps"] == 17
    assert resumed["loaded"] == [7, [0.0, 1.0, 2.0]]
    assert resumed["steps"] == 17
    assert resumed["logged"] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert resumed["initial_epoch"] is None
    assert resumed["error"] == (
        "UsageError: resume_from_checkpoint='/none.weights.h5': no such file, or no .state.json file next to it; pass "
        "a checkpoint-<step>.weights.h5 that KerasCallbacks has saved"
    )
