"""Evaluation beside training in our Trainer: at its cadence, in its logs, with one copy per step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from skyward.errors import UsageError
from skyward.training import JsonLogger, Trainer, TrainerCallback, TrainingArguments
from skyward.training.evaluation import AsyncEvaluation, BestModel, EvaluationRecord
from skyward.training.snapshot import common_pool
from tests.training.evaluation.parts import ByHand, make_model, scored

X = torch.linspace(-1, 1, 32)[:, None].repeat(1, 4)
DATA = torch.utils.data.TensorDataset(X, X[:, :1])


class Seen(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[tuple[int, float]] = []
        self.evaluations: list[tuple[int, float]] = []

    def on_log(self, state: Any, logs: Any, **kwargs: Any) -> None:
        if "eval_loss" in logs:
            self.logs.append((state.global_step, logs["eval_loss"]))

    def on_evaluate(self, state: Any, metrics: Any, **kwargs: Any) -> None:
        self.evaluations.append((state.global_step, metrics["eval_loss"]))


def train(tmp_path: Path, *callbacks: object, **args: Any) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer(
        make_model(),
        TrainingArguments(
            output_dir=str(tmp_path),
            **{
                "per_device_train_batch_size": 8,
                "num_train_epochs": 3,
                "disable_tqdm": True,
                "save_strategy": "no",
                "learning_rate": 0.01,
                **args,
            },
        ),
        train_dataset=DATA,
        compute_loss_func=nn.functional.mse_loss,
        callbacks=callbacks,
    )
    trainer.train()
    return trainer


def asynchronous(**options: Any) -> AsyncEvaluation:
    return AsyncEvaluation(make_model, scored, X, **{"gate": "always", "max_pending": 20, **options})


def test_metrics_are_logged_at_the_step_that_was_scored(tmp_path: Path) -> None:
    seen, evaluation = Seen(), asynchronous(eval_strategy="steps", eval_steps=5)
    trainer = train(tmp_path, seen, evaluation, JsonLogger(), logging_dir=str(tmp_path / "logs"))
    assert [each.step for each in evaluation.history] == [5, 10]
    assert [step for step, _ in seen.logs] == [5, 10]
    assert seen.evaluations == seen.logs
    records = json.loads((tmp_path / "logs" / "trainer_logs.json").read_text())
    logged = [(each["global_step"], each["eval_loss"]) for each in records if "eval_loss" in each]
    assert logged == seen.logs, "once, although two events told it"
    rows = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert [(row["step"], row["epoch"]) for row in rows] == [(5, 1.25), (10, 2.5)]
    assert [row["eval_loss"] for row in rows] == [loss for _, loss in seen.logs]
    assert evaluation.evaluator is None, "it is closed"


def test_training_is_the_same_with_and_without_it(tmp_path: Path) -> None:
    def fails(model: Any, payload: Any) -> Any:
        raise ValueError("never")

    alone = train(tmp_path / "alone")
    beside = train(tmp_path / "beside", asynchronous(), AsyncEvaluation(make_model, fails, name="failing"))
    for name, each in alone.model.state_dict().items():
        assert torch.equal(each, beside.model.state_dict()[name]), name


def test_the_best_model_has_the_scored_weights(tmp_path: Path) -> None:
    best = BestModel(tmp_path / "best.safetensors", "loss")
    train(tmp_path, asynchronous(best=best))
    from safetensors.torch import load_file

    model = make_model()
    model.load_state_dict(load_file(best.path))
    assert scored(model.eval(), X)["loss"].item() == best.value


def test_training_stops_when_the_metric_gets_worse(tmp_path: Path) -> None:
    values = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    def worse(model: Any, payload: Any) -> dict[str, float]:
        return {"loss": next(values)}

    evaluation = AsyncEvaluation(
        make_model, worse, gate="sync", eval_strategy="steps", eval_steps=1, stop_on="eval_loss", patience=2
    )
    trainer = train(tmp_path, evaluation, save_strategy="steps", save_steps=100)
    assert trainer.state.global_step == 3
    assert (tmp_path / "checkpoint-3").exists()


def test_checkpoint_and_evaluation_of_a_step_share_one_copy(tmp_path: Path) -> None:
    hand, pool = ByHand(), common_pool()
    evaluation = asynchronous(compute=hand, eval_strategy="steps", eval_steps=4)
    shared: list[bool] = []

    class Looks(TrainerCallback):
        """Callback that sees a checkpoint on the disk, so that the evaluation of its step may end."""

        def on_save(self, **kwargs: Any) -> None:
            shared.append(True)
            hand.end(len(shared) - 1, {"loss": 1.0})

    taken: list[int] = []
    copy = pool._copy

    def counted(buffers: list[torch.Tensor], sources: list[torch.Tensor]) -> list[Any]:
        taken.append(sum(each.numel() for each in sources))
        return copy(buffers, sources)

    pool._copy = counted  # type: ignore[method-assign]
    train(tmp_path, evaluation, Looks(), async_save=True, save_strategy="steps", save_steps=4, optim="sgd")
    weights = sum(each.numel() for each in make_model().state_dict().values())
    assert shared
    # For each step, the evaluation's copy is all of the model, and the checkpoint's has none of it.
    assert weights in taken
    assert sum(each >= weights for each in taken) == 3 + len(shared)


def test_a_run_that_raises_leaves_no_evaluation_open(tmp_path: Path) -> None:
    hand = ByHand()
    evaluation = asynchronous(compute=hand, eval_strategy="steps", eval_steps=1)

    class Fails(TrainerCallback):
        def on_step_end(self, state: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        train(tmp_path, evaluation, Fails())
    assert evaluation.evaluator is None
    assert all(future.cancelled() for _, future in hand.jobs)


def test_its_state_is_in_checkpoints() -> None:
    first, second = asynchronous(stop_on="loss", name="a"), asynchronous(stop_on="loss", name="a")
    first.history.append(EvaluationRecord(step=5, snapshot_id="s", submitted_at=1.0, status="ok", metrics={"loss": 1}))
    assert first.state_key == "AsyncEvaluation.a"
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.history == first.history


@pytest.mark.parametrize("options", [{"eval_strategy": "no"}, {"eval_steps": 0}, {"patience": 0}])
def test_wrong_arguments_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"AsyncEvaluation.{next(iter(options))}="):
        asynchronous(**options)
