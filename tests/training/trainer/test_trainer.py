"""A Trainer's treatment of models, data and arguments in cases that Hugging Face's leaves open or gets wrong."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from skyward.errors import UsageError
from skyward.training import (
    DDPTrainer,
    DDPTrainingArguments,
    EvalPrediction,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from tests.training.trainer.regression import Line, Points, Stream, callback, history, losses, run, spy, trainer

ILLEGAL: list[tuple[dict[str, Any], str]] = [
    ({"max_steps": 0}, r"max_steps=0: must be a whole number >= 1, or -1"),
    ({"max_steps": 1.5}, r"max_steps=1\.5"),
    ({"num_train_epochs": 0}, r"num_train_epochs=0: must be a number > 0"),
    ({"num_train_epochs": float("nan")}, r"num_train_epochs=nan"),
    ({"save_strategy": "hourly"}, r"save_strategy='hourly': must be one of 'no', 'steps', 'epoch', 'best'"),
    ({"eval_strategy": "best"}, r"eval_strategy='best'"),
    ({"logging_steps": 0}, r"logging_steps=0: must be a whole number of steps >= 1, or a share"),
    ({"save_steps": 2.5}, r"save_steps=2\.5"),
    ({"learning_rate": -1e-3}, r"learning_rate=-0\.001: must be a number >= 0"),
    ({"learning_rate": "1e-3"}, r"learning_rate='1e-3'"),
    ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps=0"),
    ({"per_device_train_batch_size": True}, r"per_device_train_batch_size=True"),
    ({"save_total_limit": 0}, r"save_total_limit=0: must be a whole number >= 1, or None"),
    ({"warmup_steps": -1}, r"warmup_steps=-1"),
    ({"adam_beta1": 1.0}, r"adam_beta1=1\.0: must be a number >= 0 and < 1"),
    ({"optim": "adam"}, r"optim='adam': must be one of 'adamw_torch'"),
    ({"lr_scheduler_type": "magic"}, r"lr_scheduler_type='magic'"),
    ({"seed": -1}, r"seed=-1"),
    ({"fp16": True, "bf16": True}, r"fp16=True: excludes bf16=True"),
    ({"dataloader_prefetch_factor": 2}, r"dataloader_prefetch_factor=2: needs worker processes"),
    ({"bf16": "false"}, r"bf16='false': must be True or False"),
    ({"dispatch_batches": "yes"}, r"dispatch_batches='yes': must be True, False or None"),
    ({"output_dir": 5}, r"output_dir=5: must be a path, or None"),
    ({"resume_from_checkpoint": 3}, r"resume_from_checkpoint=3: must be a checkpoint's folder, True, 'auto', or None"),
    ({"metric_for_best_model": 3}, r"metric_for_best_model=3: must be a metric's name, or None"),
    ({"save_strategy": "best"}, r"eval_strategy='no'"),
    ({"label_smoothing_factor": 1.5}, r"label_smoothing_factor=1\.5: must be a number from 0 to 1"),
    ({"eval_accumulation_steps": 0}, r"eval_accumulation_steps=0: must be a whole number >= 1, or None"),
    ({"run_name": 3}, r"run_name=3: must be text, or None"),
    ({"activation_checkpointing_kwargs": "no"}, r"activation_checkpointing_kwargs='no': must be a dictionary, or None"),
    ({"gradient_checkpointing": "yes"}, r"gradient_checkpointing='yes': must be True, False or None"),
    (
        {"optim_args": "momentum=1"},
        r"optim_args='momentum=1': optim='adamw_torch_fused' has no option 'momentum' .options: none",
    ),
    ({"optim": "sgd", "optim_args": "momentum=x"}, r"optim_args='momentum=x': momentum=x must be a number"),
    (
        {"optim": "sgd", "optim_args": "weight_decay=1"},
        r"has no option 'weight_decay' \(options: momentum, dampening, nesterov\); ",
    ),
    (
        {"optim": "sgd", "optim_args": "nesterov=maybe"},
        r"nesterov=maybe must be a flag; set nesterov to one of true, 1, yes, false",
    ),
    ({"optim": "sgd", "optim_args": "nesterov=1"}, r"nesterov needs momentum"),
    ({"load_best_model_at_end": True}, r"save_strategy='steps' differs from eval_strategy='no'"),
    (
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 5},
        r"save_steps=5 is not a multiple of eval_steps=3",
    ),
]


@pytest.mark.parametrize(("args", "message"), ILLEGAL)
def test_arguments_are_refused_with_field_value_and_range(args: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainingArguments(**args)


def test_the_output_dir_may_come_without_its_name() -> None:
    assert TrainingArguments("out", max_steps=3) == TrainingArguments(output_dir="out", max_steps=3)


def test_one_of_several_processes_without_a_group_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"WORLD_SIZE=2 .* not initialized; call init_process_group"):
        trainer(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    trainer(tmp_path)


def test_a_trainer_names_a_missing_argument(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither model nor model_init"):
        Trainer()
    with pytest.raises(UsageError, match="there is no eval_dataset"):
        trainer(tmp_path, eval_strategy="epoch", eval_dataset=None)
    with pytest.raises(UsageError, match="no length"):
        trainer(tmp_path, data=Stream(4))
    with pytest.raises(UsageError, match="train_dataset=None: nothing to train on"):
        Trainer(Line(), TrainingArguments(output_dir=tmp_path, use_cpu=True)).train()
    with pytest.raises(UsageError, match="returned no loss, only y; return the loss first"):
        run(tmp_path, model=Gives(lambda loss, y: {"y": y}), max_steps=1)
    with pytest.raises(UsageError, match=r"Gives: returned a tensor of shape \(4, 1\) in place of a loss"):
        run(tmp_path, model=Gives(lambda loss, y: y[:, None]), max_steps=1)
    with pytest.raises(UsageError, match=r"args='out': not TrainingArguments; pass skyward.training.TrainingArguments"):
        Trainer(Line(), "out")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no parameter requires a gradient"):
        run(tmp_path, model=Line().requires_grad_(False), max_steps=1)
    with pytest.raises(UsageError, match=r"lr_scheduler_kwargs=\{'cycles': 2\}: does not fit 'cosine'"):
        run(tmp_path, lr_scheduler_type="cosine", lr_scheduler_kwargs={"cycles": 2}, max_steps=1)
    with pytest.raises(UsageError, match=r"returned a tensor of shape \(4,\) in place of a loss"):
        run(tmp_path, model=Gives(lambda loss, y: y), max_steps=1)
    with pytest.raises(UsageError, match=r"callbacks=<.*>: must be a list"):
        Trainer(Line(), callbacks=TrainerCallback())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"TrainingArguments.report_to='wandb': must be 'none'"):
        TrainingArguments(report_to="wandb")
    with pytest.raises(TypeError) as caught:
        run(tmp_path, model=nn.Linear(1, 1), data=[(torch.zeros(1), torch.zeros(1))] * 4, max_steps=1)
    assert any("compute_loss_func" in note for note in caught.value.__notes__)


def test_a_process_that_is_alone_needs_no_process_group(tmp_path: Path) -> None:
    args = DDPTrainingArguments(tmp_path, max_steps=2, disable_tqdm=True, use_cpu=True)
    trainer = DDPTrainer(Line(), args, train_dataset=Points(20))
    assert trainer.train().global_step == 2
    assert trainer.get_process_groups() == {}


class Gives(Line):
    """A line whose forward returns `shape(loss, y)`."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        loss, y = super().forward(x, labels)
        return self.shape(loss, y)


class Output:
    def __init__(self, loss: torch.Tensor, y: torch.Tensor) -> None:
        self.loss, self.logits = loss, y


SHAPES: dict[str, Any] = {
    "a tuple": lambda loss, y: (loss, y),
    "a dictionary": lambda loss, y: {"loss": loss, "y": y},
    "an object": Output,
    "the loss": lambda loss, y: loss,
    "a loss for each sample": lambda loss, y: (loss.expand(len(y)), y),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_models_may_return_their_loss_in_any_of_the_usual_ways(shape: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "logging_steps": 1, "eval_strategy": "epoch"}
    usual = run(tmp_path, **options)
    assert history(run(tmp_path, model=Gives(SHAPES[shape]), **options)) == history(usual)


def test_pairs_and_a_loss_function_make_a_trainer_of_any_module(tmp_path: Path) -> None:
    points = Points(20)
    pairs = torch.utils.data.TensorDataset(points.x[:, None], 2 * points.x[:, None] + 3)
    made = Trainer(
        nn.Linear(1, 1),
        TrainingArguments(output_dir=tmp_path, num_train_epochs=60, learning_rate=0.1, save_strategy="no", use_cpu=True,
                          disable_tqdm=True),
        train_dataset=pairs,
        compute_loss_func=nn.functional.mse_loss,
    )  # fmt: skip
    made.train()
    done = made.predict(pairs)
    assert done.metrics["test_loss"] < 1e-3
    assert done.predictions == pytest.approx(done.label_ids, abs=0.1)
    assert done.predictions.shape == (20, 1)


def test_rows_of_lists_are_stacked_without_a_collator(tmp_path: Path) -> None:
    class Next(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 8)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = self.table(input_ids)
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits

    rows = [{"input_ids": [i, i + 1, i + 2], "label": [i + 1, i + 2, i + 3], "text": "left out"} for i in range(5)]
    made = run(tmp_path, model=Next(), data=rows, eval_dataset=rows, max_steps=2)
    assert made.predict(rows).predictions.shape == (5, 3, 8)


def test_compute_loss_can_be_overridden(tmp_path: Path) -> None:
    class Absolute(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: torch.Tensor | None = None
        ) -> Any:
            outputs = model(inputs["x"])
            loss = (outputs[0] - inputs["labels"]).abs().mean()
            return (loss, outputs) if return_outputs else loss

    made = Absolute(Line(), TrainingArguments(output_dir=tmp_path, use_cpu=True), eval_dataset=Points(9))
    points = Points(9)
    assert made.evaluate()["eval_loss"] == pytest.approx((2 * points.x + 3).abs().mean().item())


def gradient(model: nn.Module, points: Points, indices: list[int]) -> torch.Tensor:
    rows = [points[index] for index in indices]
    loss = model(torch.stack([row["x"] for row in rows]), torch.stack([row["labels"] for row in rows]))[0]
    return torch.cat([each[None] for each in torch.autograd.grad(loss, list(model.parameters()))])


def test_a_step_of_uneven_micro_batches_has_the_gradient_of_all_its_samples(tmp_path: Path) -> None:
    """There are 7 samples in micro-batches of 4 and 3: the mean of two means would be another."""
    points, seen = Points(7), []

    def keep(model: nn.Module, **_: Any) -> None:
        seen.append(torch.stack([each.grad.clone() for each in model.parameters() if each.grad is not None]))

    made = run(tmp_path, data=points, gradient_accumulation_steps=2, num_train_epochs=1, max_grad_norm=0.0,
               callbacks=[callback(on_pre_optimizer_step=keep)], logging_steps=1)  # fmt: skip
    torch.testing.assert_close(seen[0], gradient(Line(), points, list(range(7))))
    rows = [points[index] for index in range(7)]
    assert losses(made) == pytest.approx([sum(row["labels"].item() ** 2 for row in rows) / 7])


def test_the_loss_of_an_evaluation_is_that_of_all_samples(tmp_path: Path) -> None:
    """There are 9 samples in batches of 8 and 1."""
    points = Points(9)
    expected = ((2 * points.x + 3) ** 2).mean().item()
    assert trainer(tmp_path, eval_dataset=points).evaluate()["eval_loss"] == pytest.approx(expected)


def test_evaluation_restores_the_modes_of_modules_and_the_generators(tmp_path: Path) -> None:
    made = trainer(tmp_path, model=Line(dropout=0.5))
    made.model.train()
    frozen = made.model.dropout
    assert isinstance(frozen, nn.Dropout)
    frozen.eval()
    before = torch.get_rng_state()
    made.evaluate()
    assert made.model.training
    assert not frozen.training
    assert torch.equal(torch.get_rng_state(), before)


def test_predictions_stay_on_the_device_for_as_many_batches_as_the_arguments_say(tmp_path: Path) -> None:
    def alive(steps: int | None) -> tuple[list[int], Any]:
        """Return how many batches' predictions exist after each of five batches, and the predictions."""
        made: list[weakref.ref[torch.Tensor]] = []
        seen: list[int] = []

        def keeps(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            copied = logits.clone()
            made.append(weakref.ref(copied))
            return copied

        one = trainer(tmp_path, eval_accumulation_steps=steps, per_device_eval_batch_size=2, callbacks=[
            callback(on_prediction_step=lambda **_: seen.append(sum(each() is not None for each in made)))
        ])  # fmt: skip
        one.preprocess_logits_for_metrics = keeps
        return seen, one.predict(Points(9)).predictions.tolist()

    at_once, predictions = alive(None)
    assert at_once == [1, 1, 1, 1, 1]  # the one that was just made
    assert alive(3) == ([1, 2, 1, 1, 2], predictions)


def test_smoothed_labels_are_those_of_torch_for_any_model_that_returns_logits(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 5)
    x, labels = torch.randn(8, 3), torch.tensor([0, 1, 2, 3, 4, -100, 1, 0])
    expected = nn.functional.cross_entropy(model(x), labels, label_smoothing=0.3).item()
    rows = list(zip(x, labels, strict=True))
    options: dict[str, Any] = {"label_smoothing_factor": 0.3, "max_steps": 1, "logging_steps": 1}
    options |= {"per_device_train_batch_size": 8, "eval_dataset": rows, "eval_strategy": "steps", "learning_rate": 0.0}
    logged = run(tmp_path, model=model, data=rows, **options).state.log_history
    assert logged[0]["loss"] == pytest.approx(expected)
    assert logged[1]["eval_loss"] == pytest.approx(expected)
    with pytest.raises(UsageError, match=r"label_smoothing_factor=0.3: needs logits and class indices .*float32"):
        run(tmp_path, model=model, data=[(row, label.float()) for row, label in rows], **options)


def test_activations_are_recomputed_by_a_model_that_can(tmp_path: Path) -> None:
    asked: list[Any] = []

    class Can(Line):
        def gradient_checkpointing_enable(self, **options: Any) -> None:
            asked.append(options)

    run(tmp_path, model=Can(), max_steps=1, gradient_checkpointing=True)
    kwargs = {"use_reentrant": False, "every_n_layers": 2}
    run(tmp_path, model=Can(), max_steps=1, gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    run(tmp_path, model=Can(), max_steps=1)
    assert asked == [{}, {"every_n_layers": 2, "gradient_checkpointing_kwargs": {"use_reentrant": False}}]
    with pytest.raises(UsageError, match="activation_checkpointing=True: Line has neither"):
        run(tmp_path, max_steps=1, activation_checkpointing=True)


def test_metrics_are_computed_on_all_predictions_and_reach_callbacks(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = []
    made = trainer(
        tmp_path,
        eval_dataset={"few": Points(3), "many": Points(11)},
        compute_metrics=lambda told: {"samples": len(told.predictions), "error": abs(told.label_ids).mean()},
        callbacks=[callback(on_evaluate=lambda metrics, **_: said.append(dict(metrics)))],
    )
    metrics = made.evaluate()
    assert (metrics["eval_few_samples"], metrics["eval_many_samples"]) == (3, 11)
    assert isinstance(metrics["eval_few_error"], float)
    assert [each.get("eval_few_samples", each.get("eval_many_samples")) for each in said] == [3, 11]
    assert EvalPrediction(1, 2).predictions == 1


def test_predictions_of_different_lengths_are_padded(tmp_path: Path) -> None:
    class Ragged(Line):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            return self.a + torch.zeros((), device=x.device), x[:, None].expand(len(x), 2 + (len(x) < 8))

    done = trainer(tmp_path, model=Ragged()).predict(Points(9))
    assert done.predictions.shape == (9, 3)
    assert (done.predictions[:8, 2] == -100).all()


def test_a_stop_saves_and_an_abort_does_not(tmp_path: Path) -> None:
    for ask, saved in (("stop", ["checkpoint-3"]), ("abort", [])):
        seen: list[str] = []

        def asks(state: Any, control: Any, _ask: str = ask, **_: Any) -> None:
            if state.global_step == 3:
                getattr(control, _ask)()

        options: dict[str, Any] = {"max_steps": 8, "eval_strategy": "epoch", "save_steps": 100}
        made = run(tmp_path / ask, callbacks=[callback(on_step_end=asks), spy(seen)], **options)
        assert made.state.global_step == 3
        assert [each.name for each in (tmp_path / ask).glob("checkpoint-*")] == saved
        assert ("on_evaluate" in seen) is (ask == "stop")
        assert seen[-3:] == ["on_epoch_end", "on_log", "on_train_end"] or ask == "stop"


def test_without_a_save_strategy_a_stop_saves_nothing_and_a_save_and_stop_does(tmp_path: Path) -> None:
    run(tmp_path, callbacks=[callback(on_step_end=lambda control, **_: control.stop())], save_strategy="no")
    assert not list(tmp_path.glob("checkpoint-*"))
    run(tmp_path, callbacks=[callback(on_step_end=lambda control, **_: control.save_and_stop())], save_strategy="no")
    assert [each.name for each in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_no_event_comes_twice_and_no_step_is_empty_at_the_end_of_data(tmp_path: Path) -> None:
    seen: list[str] = []
    run(tmp_path, callbacks=[spy(seen)], gradient_accumulation_steps=2, num_train_epochs=2, logging_steps=3)
    step = ["on_step_begin", "on_forward_backward_begin", "on_forward_backward_end", "on_substep_end",
            "on_forward_backward_begin", "on_forward_backward_end", "on_pre_optimizer_step", "on_optimizer_step",
            "on_train_metrics", "on_step_end"]  # fmt: skip
    last = [*step[:3], *step[6:]]
    log = ["on_log_step", "on_log"]
    epochs = [*step, *step, *last, *log], [*step, *step, *last, *log, "on_save"]
    assert seen == [
        "on_init_end",
        "on_train_begin",
        *(event for epoch in epochs for event in ("on_epoch_begin", *epoch, "on_epoch_end")),
        "on_log",
        "on_train_end",
    ]


def test_an_epoch_without_data_ends_the_run(tmp_path: Path) -> None:
    made = run(tmp_path, data=Stream(0), max_steps=4)
    assert made.state.global_step == 0


def test_unused_columns_are_named_with_advice(tmp_path: Path) -> None:
    made = trainer(tmp_path, model=torch.nn.Sequential(torch.nn.Linear(1, 1)), max_steps=1)
    with pytest.raises(UsageError, match=r"columns=\['x', 'labels'\]: Sequential takes \['input'\]"):
        made.train()


def test_losses_that_are_not_finite_are_left_out_unless_all_are(tmp_path: Path) -> None:
    class Spiky(Line):
        calls = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            self.calls += 1
            loss, y = super().forward(x, labels)
            return (loss.detach() * float("nan") if self.calls in (2, 3, 4) else loss) + 0 * loss, y

    options: dict[str, Any] = {"max_steps": 6, "logging_steps": 2, "learning_rate": 0.0}
    filtered = losses(run(tmp_path, model=Spiky(), **options))
    assert filtered[0] == pytest.approx(losses(run(tmp_path, **options | {"max_steps": 2, "logging_steps": 1}))[0])
    assert filtered[1] != filtered[1]
    shown = losses(run(tmp_path, model=Spiky(), logging_nan_inf_filter=False, **options))
    assert shown[0] != shown[0]


@pytest.mark.parametrize(("finite", "expected"), [(2, 9.0), (0, math.nan)])
def test_the_mean_loss_of_a_run_ignores_intervals_without_a_loss(tmp_path: Path, finite: int, expected: float) -> None:
    class Diverges(Line):
        calls = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            self.calls += 1
            return (self.a * 0 + (9.0 if self.calls <= finite else math.nan),)

    made = run(tmp_path, model=Diverges(), max_steps=6, logging_steps=2, learning_rate=0.0)
    assert made.state.log_history[-1]["train_loss"] == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_and_keeps_its_scale_in_checkpoints(precision: str, tmp_path: Path) -> None:
    kinds = set()

    class Seen(Line):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            kinds.add((x[:, None] @ torch.ones(1, 1)).dtype)
            return super().forward(x, labels)

    options: dict[str, Any] = {precision: True, "max_steps": 4, "logging_steps": 1, "save_steps": 2}
    whole = run(tmp_path, model=Seen(), **options)
    assert kinds == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert losses(whole)[0] == pytest.approx(losses(run(tmp_path / "full", max_steps=1, logging_steps=1))[0], rel=1e-2)
    assert history(run(tmp_path, str(tmp_path / "checkpoint-2"), **options)) == history(whole)


def test_fp16_skips_a_step_that_overflows_and_the_schedule_waits(tmp_path: Path) -> None:
    class Overflows(Line):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            loss, y = super().forward(x, labels)
            return loss * (1e36 if self.training and self.a == 0 else 1.0), y

    made = run(tmp_path, model=Overflows(), fp16=True, max_steps=2, logging_steps=1)
    assert made.model.a == 0
    rates = [each["learning_rate"] for each in made.state.log_history if "learning_rate" in each]
    assert rates[0] == rates[1]


def test_the_best_model_is_loaded_at_the_end_and_is_the_scored_one(tmp_path: Path) -> None:
    weights: list[float] = []
    made = run(
        tmp_path,
        callbacks=[callback(on_evaluate=lambda model, **_: weights.append(model.a.item()))],
        max_steps=8,
        learning_rate=3.0,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        save_total_limit=2,
    )
    scores = [each["eval_loss"] for each in made.state.log_history if "eval_loss" in each]
    best = scores.index(min(scores))
    assert 0 < best < 7
    assert made.state.best_global_step == best + 1
    assert made.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best + 1}")
    assert dict(made.model.named_parameters())["a"].item() == weights[best]
    assert {each.name for each in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{best + 1}", "checkpoint-8"}


def test_users_bring_their_own_optimizer_schedule_and_model_factory(tmp_path: Path) -> None:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    made = run(tmp_path, model=model, optimizers=(optimizer, schedule), max_steps=5, logging_steps=1)
    rates = [each["learning_rate"] for each in made.state.log_history if "learning_rate" in each]
    assert rates == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005])
    again = Trainer(None, TrainingArguments(output_dir=tmp_path, use_cpu=True), model_init=lambda: nn.Linear(2, 2))
    torch.manual_seed(42)
    assert torch.equal(dict(again.model.named_parameters())["weight"], nn.Linear(2, 2).weight)


def test_a_plateau_lowers_the_learning_rate(tmp_path: Path) -> None:
    made = run(tmp_path, max_steps=4, logging_steps=1, eval_strategy="steps", eval_steps=1, learning_rate=1e-9,
               lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "eps": 0.0})  # fmt: skip
    rates = [each["learning_rate"] for each in made.state.log_history if "learning_rate" in each]
    assert rates[-1] < rates[0]


def test_columns_that_the_model_does_not_take_are_left_out(tmp_path: Path) -> None:
    rows = [{"x": torch.tensor(1.0), "label": torch.tensor(5.0), "text": "one"} for _ in range(4)]
    assert losses(run(tmp_path, data=rows, max_steps=1, logging_steps=1)) == pytest.approx([25.0])


def test_a_callback_added_later_is_called_and_a_removed_one_is_not(tmp_path: Path) -> None:
    class Counts(TrainerCallback):
        steps = 0

        def on_step_end(self, **_: Any) -> None:
            self.steps += 1

    stays, goes = Counts(), Counts()
    made = trainer(tmp_path, max_steps=2)
    made.add_callback(stays)
    made.add_callback(goes)
    assert made.pop_callback(goes) is goes
    made.train()
    assert (stays.steps, goes.steps) == (2, 0)


def test_the_default_callbacks_are_there_unless_the_user_replaces_them(tmp_path: Path) -> None:
    from skyward.training import DefaultMetrics

    args = TrainingArguments(output_dir=tmp_path, use_cpu=True)
    mine = DefaultMetrics(peak_hardware_flops=1e12)
    given = list(Trainer(Line(), args, callbacks=[mine]).callback_handler)
    assert [each for each in given if isinstance(each, DefaultMetrics)] == [mine]
    default = [type(each).__name__ for each in Trainer(Line(), args).callback_handler]
    assert default[0] == "DefaultMetrics"


def test_weights_are_saved_where_other_libraries_read_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    made = trainer(tmp_path)
    made.save_model(tmp_path / "model")
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == {"a", "b"}
