"""Evaluations beside the real Trainer of transformers."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from skyward.errors import UsageError
from skyward.training import HFCallbacks, JsonLogger
from skyward.training.evaluation import BestModel, Timeline, model_state
from skyward.training.sakura import SakuraHFCallback
from tests.training.events import scalars_in, without_tensorflow
from tests.training.frameworks.models import (
    DATA,
    Gate,
    Line,
    error_of,
    perplexity,
    slope,
    tiny_gpt2,
    tiny_lora,
    token_rows,
)

without_tensorflow()  # tensorboard would load it

LINE: dict[str, Any] = {"model_factory": Line, "eval_fn": slope, "eval_payload": None, "verbose": False}
STEPS = 6  # of an epoch


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    left = [each for each in threading.enumerate() if "evaluation" in each.name]
    for each in left:
        each.join(60)
    assert not [each for each in left if each.is_alive()]


def trainer(folder: Path, *callbacks: Any, model: Any = None, data: Any = DATA, **chosen: Any) -> Trainer:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "learning_rate": 0.1,
        "seed": 1,
        **chosen,
    }
    made = Trainer(
        model=model or Line(),
        args=TrainingArguments(output_dir=str(folder), **given),
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=list(callbacks),
    )
    made.remove_callback(PrinterCallback)
    return made


class Inline(TrainerCallback):  # type: ignore[misc]  # it is Any to mypy here
    """Callback that scores a copy of the current model at the end of every epoch."""

    def __init__(self, score: Any, payload: Any) -> None:
        self._score, self._payload, self.metrics = score, payload, list[dict[str, float]]()

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.metrics.append(self._score(copy.deepcopy(model).eval(), self._payload))


class Watches(TrainerCallback):  # type: ignore[misc]
    """Callback that notes the reported metrics, and their step."""

    def __init__(self) -> None:
        self.logs: list[tuple[int, dict[str, Any]]] = []
        self.evaluations: list[tuple[int, dict[str, Any]]] = []
        self.at: list[int] = []
        self._step = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        self.logs.append((state.global_step, dict(logs)))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self.evaluations.append((state.global_step, dict(metrics)))
        self.at.append(self._step)


class Opens(TrainerCallback):  # type: ignore[misc]
    """Callback that lets a gate's evaluations through when training has come to a step."""

    def __init__(self, gate: Gate, step: int) -> None:
        self._gate, self._step = gate, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._gate.opened.set()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._gate.opened.set()


class Waits(TrainerCallback):  # type: ignore[misc]
    """Callback that delays training before a step until nothing is pending, like a slow step."""

    def __init__(self, beside: Any, *steps: int) -> None:
        self._beside, self._steps = beside, steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # `pending` counts evaluations that have ended and are not reported yet, and this thread is the one that
        # reports.
        evaluator = self._beside._evaluations.evaluator
        while state.global_step in self._steps and evaluator.pending:
            threading.Event().wait(0.005)


@pytest.mark.parametrize("gate", ["always", "auto", "sync"])
def test_results_equal_inline_evaluation_to_the_bit(gate: Any, tmp_path: Path) -> None:
    rows = token_rows()
    inline = Inline(perplexity, rows)
    beside = SakuraHFCallback(model_factory=tiny_gpt2, eval_fn=perplexity, eval_payload=rows, gate=gate, verbose=False)
    trainer(tmp_path, inline, beside, model=tiny_gpt2(), data=rows, learning_rate=1e-2).train()
    assert [row["loss"] for row in beside.history] == [each["loss"] for each in inline.metrics]
    assert len({row["loss"] for row in beside.history}) == 3


def test_rows_keep_the_usual_keys_and_gain_ours(tmp_path: Path) -> None:
    beside = SakuraHFCallback(**{**LINE, "eval_fn": error_of, "eval_payload": DATA[:4]}, gate="always")
    made = trainer(tmp_path, beside)
    made.train()
    assert [(row["epoch"], row["step"], row["status"]) for row in beside.history] == [
        (1, 6, "ok"),
        (2, 12, "ok"),
        (3, 18, "ok"),
    ]
    for row, record in zip(beside.history, beside.records, strict=True):
        assert isinstance(row["epoch"], int)
        assert row["loss"] == record.metrics["loss"]
        assert row["elapsed_secs"] >= 0
        assert row["submitted_at"] <= row["started_at"] <= row["finished_at"]
        assert row["snapshot_id"]
        assert row["worker"] == "in-process"
    entries = [entry for entry in made.state.log_history if "eval_loss" in entry]
    assert [(entry["step"], entry["eval_loss"]) for entry in entries] == [
        (row["step"], row["loss"]) for row in beside.history
    ]
    # Training's own loss stays recognisable.
    assert not [entry for entry in entries if "loss" in entry]
    assert beside.pending == 0


# Defect 1 of the reference: a snapshot on the CPU that aliases the weights.
def test_the_weights_of_the_step_are_scored_however_far_training_has_gone(tmp_path: Path) -> None:
    gate, watches = Gate(), Watches()
    beside = SakuraHFCallback(**{**LINE, "eval_fn": gate}, gate="always")
    inline = Inline(slope, None)
    trainer(tmp_path, inline, beside, watches, Opens(gate, 15)).train()
    assert [row["a"] for row in beside.history] == [each["a"] for each in inline.metrics]
    assert [step for step, _ in watches.evaluations] == [6, 12, 18]
    assert watches.at[0] >= 15  # the steps between did not wait


def test_training_is_the_same_with_and_without_it(tmp_path: Path) -> None:
    def weights(*callbacks: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        model = tiny_gpt2()
        trainer(tmp_path, *callbacks, model=model, data=token_rows()).train()
        return dict(model.state_dict())

    rows = token_rows()
    beside = SakuraHFCallback(
        model_factory=tiny_gpt2, eval_fn=perplexity, eval_payload=rows, gate="always", verbose=False
    )
    with_it, without = weights(beside), weights()
    assert len(beside.history) == 3
    assert all(torch.equal(with_it[name], without[name]) for name in without)


def test_logs_and_integrations_get_the_evaluated_step(tmp_path: Path) -> None:
    gate, watches = Gate(), Watches()
    beside = SakuraHFCallback(**{**LINE, "eval_fn": gate}, gate="always")
    ours = HFCallbacks([JsonLogger()], logging_dir=str(tmp_path / "logs"))
    made = trainer(tmp_path, ours, beside, watches, Opens(gate, 15), report_to=["tensorboard"])
    made.train()
    by_step = {row["step"]: row["a"] for row in beside.history}
    told = [(step, logs["eval_a"]) for step, logs in watches.logs if "eval_a" in logs]
    assert told == [(6, by_step[6]), (12, by_step[12]), (18, by_step[18])]
    drawn = [scalars["eval/a"] for each in tmp_path.rglob("events*") if "eval/a" in (scalars := scalars_in(each))]
    assert [[step for step, _ in each] for each in drawn] == [[6, 12, 18]]
    records = json.loads((tmp_path / "logs" / "trainer_logs.json").read_text())
    assert [(each["global_step"], each["eval_a"]) for each in records if "eval_a" in each] == told
    # The steps themselves are logged as usual.
    assert [step for step, logs in watches.logs if "loss" in logs] == list(range(1, 19))


def test_evaluations_may_run_every_n_steps(tmp_path: Path) -> None:
    beside = SakuraHFCallback(**LINE, cadence=4, gate="always")
    trainer(tmp_path, beside).train()
    assert [(row["step"], round(row["epoch"], 2)) for row in beside.history] == [
        (4, 0.67), (8, 1.33), (12, 2.0), (16, 2.67)
    ]  # fmt: skip


class Falls:
    """Dispatcher whose scores are given, whatever the model."""

    def __init__(self, *scores: float) -> None:
        self._scores = list(scores)

    def __call__(self, model: Any, payload: Any) -> dict[str, float]:
        return {"loss": self._scores.pop(0)}


BY_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}


def test_in_place_of_the_trainers_own_it_stops_early_and_loads_the_best_weights(tmp_path: Path) -> None:
    scores = Falls(0.5, 0.2, 0.4, 0.9, 0.9, 0.9)
    beside = SakuraHFCallback(**{**LINE, "eval_fn": scores}, cadence="trainer", gate="always")
    inline, watches = Inline(slope, None), Watches()
    stops = EarlyStoppingCallback(early_stopping_patience=2)
    made = trainer(
        tmp_path, inline, beside, watches, stops, Waits(beside, 6, 12, 18, 24, 30), num_train_epochs=6, **BY_EPOCH
    )
    made.train()
    # The fourth epoch's result is the second that is worse. It comes in the fifth.
    assert made.state.global_step == 4 * STEPS + 1
    assert (made.state.best_metric, made.state.best_global_step) == (0.2, 2 * STEPS)
    assert Path(made.state.best_model_checkpoint).name == f"checkpoint-{2 * STEPS}"
    assert made.model.a.item() == inline.metrics[1]["a"]
    assert [step for step, _ in watches.evaluations] == [6, 12, 18, 24, 25]  # as HF evaluates where it stops
    assert not [entry for entry in made.state.log_history if "eval_runtime" in entry]  # it evaluated nothing itself


def test_the_best_of_the_last_evaluation_is_loaded_too(tmp_path: Path) -> None:
    beside = SakuraHFCallback(**{**LINE, "eval_fn": Falls(math.nan, 0.4, 0.1)}, cadence="trainer", gate="always")
    inline = Inline(slope, None)
    made = trainer(tmp_path, inline, beside, **BY_EPOCH)
    made.train()
    assert made.state.best_global_step == 18
    assert Path(made.state.best_model_checkpoint).name == "checkpoint-18"
    assert made.model.a.item() == inline.metrics[2]["a"]


def test_a_scheduler_that_waits_for_a_metric_steps_once_for_each_result(tmp_path: Path) -> None:
    beside = SakuraHFCallback(**{**LINE, "eval_fn": Falls(0.5, 0.6, 0.7)}, cadence="trainer", gate="sync")
    made = trainer(
        tmp_path,
        beside,
        eval_strategy="epoch",
        metric_for_best_model="loss",
        greater_is_better=False,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
    )
    made.train()
    assert made.lr_scheduler.last_epoch == 3
    assert made.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 * 0.5)


def test_a_metric_that_nobody_reports_is_warned_about_once(tmp_path: Path, caplog: Any) -> None:
    beside = SakuraHFCallback(**LINE, cadence="trainer", gate="sync")
    trainer(tmp_path, beside, eval_strategy="epoch", metric_for_best_model="loss").train()
    said = [each for each in caplog.messages if each.startswith("metric_for_best_model")]
    assert said == ["metric_for_best_model: eval_fn returned eval_a, but not eval_loss, so no model is the best"]


def test_late_results_are_logged_and_decide_nothing(tmp_path: Path) -> None:
    gate, watches = Gate(), Watches()
    beside = SakuraHFCallback(**{**LINE, "eval_fn": gate}, gate="always", max_age_steps=3)
    trainer(tmp_path, beside, watches, Opens(gate, 15)).train()
    assert [row["status"] for row in beside.history] == ["late", "late", "ok"]
    assert len([1 for _, logs in watches.logs if "eval_a" in logs]) == 3
    assert [step for step, _ in watches.evaluations] == [18]


def test_a_full_queue_skips_and_reports_it(tmp_path: Path) -> None:
    gate = Gate()
    beside = SakuraHFCallback(**{**LINE, "eval_fn": gate}, gate="always", max_pending=1)
    made = trainer(tmp_path, beside, Opens(gate, 17))
    made.train()
    by_step = {row["step"]: row for row in beside.history}
    assert sorted(by_step) == [6, 12, 18]
    assert by_step[12]["skipped"] is True
    assert by_step[12]["epoch"] == 2
    assert "max_pending" in by_step[12]["error"]
    assert [entry["skipped"] for entry in made.state.log_history if entry.get("step") == 12 and "status" in entry] == [
        True
    ]
    assert "skipped" not in by_step[6]


def test_strict_waits_for_the_previous_one(tmp_path: Path) -> None:
    gate, timeline, watches = Gate(), Timeline(), Watches()
    gate.opened.set()
    beside = SakuraHFCallback(**{**LINE, "eval_fn": gate}, gate="always", drain="strict", timeline=timeline)
    trainer(tmp_path, beside, watches).train()
    assert [step for step, _ in watches.evaluations] == [6, 12, 18]
    assert watches.at[0] <= 12
    assert watches.at[1] <= 18


def broken(model: Any, payload: Any) -> dict[str, float]:
    raise ZeroDivisionError("no rows")


def no_dictionary(model: Any, payload: Any) -> Any:
    return 0.5


def endless(model: Any, payload: Any) -> Any:
    payload.wait(60)


@pytest.mark.parametrize(
    ("eval_fn", "said"),
    [(broken, "ZeroDivisionError: no rows"), (no_dictionary, "dictionary"), (endless, "timeout_s")],
)
def test_an_evaluation_that_fails_is_a_row_and_training_goes_on(
    eval_fn: Any, said: str, tmp_path: Path, caplog: Any
) -> None:
    ends = threading.Event()
    wrong = {**LINE, "eval_fn": eval_fn, "eval_payload": ends}
    beside = SakuraHFCallback(**wrong, gate="always", timeout_s=0.2 if eval_fn is endless else 60.0)
    made = trainer(tmp_path, beside)
    made.train()
    ends.set()
    assert made.state.global_step == 18
    assert [row["status"] for row in beside.history] == ["failed"] * 3
    assert all(said in row["error"] for row in beside.history)
    assert [entry["status"] for entry in made.state.log_history if "status" in entry] == ["failed"] * 3


def test_an_evaluation_that_fails_ends_training_on_request(tmp_path: Path) -> None:
    beside = SakuraHFCallback(**{**LINE, "eval_fn": broken}, gate="sync", on_error="raise")
    made = trainer(tmp_path, beside)
    with pytest.raises(ZeroDivisionError, match="no rows"):
        made.train()
    assert made.state.global_step == 6
    beside.close()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft 0.21 asks transformers 5.23
def test_only_trained_weights_of_a_peft_model_travel(tmp_path: Path) -> None:
    rows, states = token_rows(), list[Any]()

    def load(model: Any, state: Any) -> None:
        from skyward.training.evaluation import load_trainable

        states.append(state)
        load_trainable(model, state)

    inline, model = Inline(perplexity, rows), tiny_lora()
    beside = SakuraHFCallback(
        model_factory=tiny_lora, eval_fn=perplexity, eval_payload=rows, gate="always", load=load, verbose=False
    )
    trainer(tmp_path, inline, beside, model=model, data=rows, learning_rate=0.05).train()
    assert [row["loss"] for row in beside.history] == [each["loss"] for each in inline.metrics]
    assert len({row["loss"] for row in beside.history}) == 3
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained
    assert trained <= set(states[0]) == set(model_state(model))
    assert sum(each.numel() for each in states[0].values()) < sum(each.numel() for each in model.parameters()) / 4


def test_the_weights_in_the_best_file_are_the_scored_ones(tmp_path: Path) -> None:
    best = BestModel(tmp_path / "best.pt", "loss")
    inline = Inline(slope, None)
    beside = SakuraHFCallback(**{**LINE, "eval_fn": Falls(0.5, 0.2, 0.7)}, gate="always", best=best)
    trainer(tmp_path, inline, beside).train()
    assert torch.load(tmp_path / "best.pt")["a"].item() == inline.metrics[1]["a"]
    assert best.record is not None
    assert best.record.step == 12


def test_one_callback_serves_several_runs(tmp_path: Path) -> None:
    beside = SakuraHFCallback(**LINE, gate="always")
    made = trainer(tmp_path, beside, num_train_epochs=1)
    made.train()
    made.train()
    assert [row["step"] for row in beside.history] == [6, 6]


def test_each_result_is_shown_in_a_line(tmp_path: Path, capsys: Any) -> None:
    beside = SakuraHFCallback(**{**LINE, "verbose": True}, gate="always")
    trainer(tmp_path, beside, num_train_epochs=1).train()
    assert "evaluation of step 6, epoch 1: a 0." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cadence": 0}, "cadence"),
        ({"drain": "later"}, "drain"),
        ({"max_pending": 0}, "max_pending"),
        ({"on_backpressure": "drop"}, "on_backpressure"),
        ({"eval_fn": None}, "eval_fn"),
        ({"val_compute": 7}, "compute"),
    ],
)
def test_mistakes_are_reported_at_construction(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SakuraHFCallback(**{**LINE, **wrong})


def test_saving_at_the_arrival_of_a_score_is_refused(tmp_path: Path) -> None:
    beside = SakuraHFCallback(**LINE, cadence="trainer")
    made = trainer(
        tmp_path, beside, eval_strategy="epoch", save_strategy="best", metric_for_best_model="a", greater_is_better=True
    )
    with pytest.raises(UsageError, match="save_strategy='best'"):
        made.train()
