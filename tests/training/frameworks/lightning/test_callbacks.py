"""skyward's callbacks under the real Trainer of Lightning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from skyward.training import DivergenceDetector, JsonLogger, TrainerCallback
from skyward.training.frameworks.lightning.callbacks import LightningCallbacks
from tests.training.frameworks.recording import Adds, Asks, Counts, Recorder

# Lightning 2.6 uses functions that torch 2.13 deprecates, and takes few workers for many cores.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

STEPS = torch.arange(10.0)[:, None]


class Line(LightningModule):  # type: ignore[misc]  # it is Any to mypy here
    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(1))
        self.automatic_optimization = not manual
        self.seen: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        (x,) = batch
        loss = ((self.a * x - 2 * x) ** 2).mean()
        self.log("train_error", loss.sqrt())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        (x,) = batch
        self.log("val_loss", ((self.a * x - 2 * x) ** 2).mean())

    def test_step(self, batch: Any, index: int) -> None:
        self.log("error", batch[0].sum())

    def predict_step(self, batch: Any, index: int) -> Any:
        return self.a * batch[0]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader() -> Any:
    return DataLoader(TensorDataset(STEPS / 10), batch_size=2)


def trainer(folder: Path, *callbacks: Any, **chosen: Any) -> Trainer:
    given = {"max_epochs": 2, "enable_checkpointing": False, **chosen}
    return Trainer(
        default_root_dir=folder,
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )


def fit(
    folder: Path, *callbacks: Any, model: Line | None = None, ckpt_path: str | None = None, **chosen: Any
) -> Trainer:
    made = trainer(folder, *callbacks, **chosen)
    made.fit(model or Line(), loader(), loader(), ckpt_path=ckpt_path)
    return made


# Pitfall 5: sanity validation, micro-batches, gradients before clipping.
def test_events_come_in_our_order(tmp_path: Path) -> None:
    ours = Recorder()
    fit(tmp_path, LightningCallbacks([ours], logging_steps=2), accumulate_grad_batches=2, max_epochs=1)
    micro = [("on_forward_backward_begin", 0), ("on_forward_backward_end", 0)]

    def at(step: int, *names: str) -> list[tuple[str, int]]:
        return [(name, step) for name in names]

    def step(number: int, batches: int, *after: str) -> list[tuple[str, int]]:
        before = number - 1
        halves = at(before, *(name for name, _ in micro))
        return [
            *at(before, "on_step_begin"),
            *[each for _ in range(batches - 1) for each in [*halves, ("on_substep_end", before)]],
            *halves,
            *at(before, "on_pre_optimizer_step", "on_optimizer_step"),
            *at(number, "on_train_metrics", "on_step_end", *after),
        ]

    expected = [
        *at(0, "on_init_end", "on_train_begin", "on_epoch_begin"),
        *step(1, 2),
        *step(2, 2, "on_log_step", "on_log"),
        *step(3, 1),  # five batches
        *at(3, *["on_prediction_step"] * 5, "on_evaluate", "on_epoch_end", "on_log", "on_train_end"),
    ]
    # on_train_metrics is before global_step counts the step
    got = [(name, at + 1 if name == "on_train_metrics" else at) for name, at in ours.events]
    assert got == expected


def test_gradients_are_clipped_before_the_optimizer_steps_and_unclipped_in_logs(tmp_path: Path) -> None:
    class Gradients(TrainerCallback):
        def __init__(self) -> None:
            self.norms: list[float] = []
            self.weights: list[tuple[float, float]] = []

        def on_pre_optimizer_step(self, model: Any, **_: Any) -> None:
            self.norms.append(float(model.a.grad.norm()))
            self.before = float(model.a.detach())

        def on_optimizer_step(self, model: Any, **_: Any) -> None:
            self.weights.append((self.before, float(model.a.detach())))
            assert model.a.grad is not None

    clipped, ours = Gradients(), Recorder(only=("on_log",))
    made = LightningCallbacks([clipped, ours], logging_steps=1)
    model = Line()
    done = fit(tmp_path, made, model=model, gradient_clip_val=0.01)
    assert clipped.norms == pytest.approx([0.01] * 10, rel=1e-3)
    assert all(before < after for before, after in clipped.weights)
    assert all(told["logs"]["grad_norm"] > 0.01 for told in ours.of("on_log")[:-1])
    # Wrappers around the run's objects are gone.
    assert "configure_gradient_clipping" not in vars(model)
    assert "save_checkpoint" not in vars(done)
    assert not done.optimizers[0]._optimizer_step_post_hooks

    by_hand = Gradients()
    fit(tmp_path, LightningCallbacks([by_hand]), model=Line(manual=True))
    assert max(by_hand.norms) == pytest.approx(0.5)
    assert len(by_hand.norms) == 10


def test_logs_are_means_over_their_steps(tmp_path: Path) -> None:
    every, third = Recorder(only=("on_log", "on_train_metrics")), Recorder(only=("on_log",))
    torch.manual_seed(0)
    fit(tmp_path, LightningCallbacks([every], logging_steps=1), accumulate_grad_batches=2)
    torch.manual_seed(0)
    fit(tmp_path, LightningCallbacks([third, Adds()], logging_steps=3), accumulate_grad_batches=2)
    losses = [told["logs"]["loss"] for told in every.of("on_log")[:-1]]
    assert [float(told["metrics"]["loss"]) for told in every.of("on_train_metrics")] == pytest.approx(losses)
    # The first batches' own: a is 0 till the first step.
    x = (STEPS / 10)[:4].reshape(2, 2)
    assert losses[0] == pytest.approx(float(((2 * x) ** 2).mean(1).mean()))
    logs = [told["logs"] for told in third.of("on_log")]
    assert [each["loss"] for each in logs[:-1]] == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3])
    assert logs[0]["epoch"] == 1.0
    assert logs[0]["ours"] == 30.0
    assert "train_error" in logs[0]
    assert not [name for each in logs for name in each if "val" in name]
    assert [told["logs"]["learning_rate"] for told in every.of("on_log")[:2]] == pytest.approx([0.1 / 3, 0.04])
    assert logs[-1]["train_loss"] == pytest.approx(sum(losses) / 6)
    assert {"train_runtime", "train_steps_per_second"} <= logs[-1].keys()


def test_a_loss_that_is_no_number_ends_a_diverging_run(tmp_path: Path) -> None:
    class Diverging(Line):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            return loss * float("nan") if self.trainer.global_step >= 3 else loss

    detector, logger = DivergenceDetector(threshold=100.0), JsonLogger()
    made = fit(tmp_path, LightningCallbacks([detector, logger], logging_steps=2), model=Diverging())
    assert made.global_step == 4
    assert [each["loss"] is None for each in json.loads((tmp_path / "logs" / "trainer_logs.json").read_text())[:2]] == [
        False,
        True,
    ]


def test_state_and_arguments_are_lightnings(tmp_path: Path) -> None:
    ours = Recorder(only=("on_step_end", "on_train_begin", "on_epoch_end"))
    made = fit(tmp_path, LightningCallbacks([ours]), accumulate_grad_batches=2)
    told = ours.of("on_step_end")
    assert [each["epoch"] for each in told] == pytest.approx([0.4, 0.8, 1.0, 1.4, 1.8, 2.0])
    assert [each["epoch"] for each in ours.of("on_epoch_end")] == [1.0, 2.0]
    args = told[0]["args"]
    assert (args.max_steps, args.logging_steps, args.num_train_epochs) == (6, made.log_every_n_steps, 2)
    assert (args.gradient_accumulation_steps, args.per_device_train_batch_size) == (2, 2)
    assert (args.output_dir, args.logging_dir) == (str(tmp_path), str(tmp_path / "logs"))
    assert told[0]["trainer"] is made
    assert told[0]["model"] is made.lightning_module
    assert told[0]["optimizer"] is made.optimizers[0]
    assert len(told[0]["train_dataloader"]) == 5
    short = Recorder(only=("on_step_end", "on_train_end"))
    fit(tmp_path, LightningCallbacks([short]), max_epochs=-1, max_steps=3)
    assert short.events == [*(("on_step_end", at) for at in (1, 2, 3)), ("on_train_end", 3)]
    assert short.of("on_step_end")[0]["args"].max_steps == 3


# Pitfalls 1, 2 and 5.
def test_an_evaluation_is_reported_once_before_the_epochs_end_and_the_sanity_check_is_not(tmp_path: Path) -> None:
    ours = Recorder(only=("on_prediction_step", "on_evaluate", "on_epoch_end", "on_log"))
    fit(tmp_path, LightningCallbacks([ours]), num_sanity_val_steps=2)
    one = ["on_prediction_step"] * 5 + ["on_evaluate", "on_epoch_end"]
    assert ours.names() == [*one, *one, "on_log"]
    assert [told["metrics"].keys() for told in ours.of("on_evaluate")] == [{"eval_loss", "eval_runtime", "epoch"}] * 2
    assert all(isinstance(told["metrics"]["eval_loss"], float) for told in ours.of("on_evaluate"))
    unchecked = Recorder(only=("on_evaluate",))
    fit(tmp_path, LightningCallbacks([unchecked]), num_sanity_val_steps=0, val_check_interval=2)
    assert [told["metrics"].keys() for told in unchecked.of("on_evaluate")] == [
        {"eval_loss", "eval_runtime", "epoch"}
    ] * 4


def test_tests_and_predictions_are_reported(tmp_path: Path) -> None:
    ours = Recorder(only=("on_predict", "on_evaluate"))
    made = trainer(tmp_path, LightningCallbacks([ours]))
    model = Line()
    made.test(model, loader(), verbose=False)
    made.predict(model, loader())
    made.validate(model, loader(), verbose=False)
    assert [told["metrics"].keys() for told in ours.of("on_predict")] == [{"test_error"}, set()]
    assert [told["metrics"].keys() for told in ours.of("on_evaluate")] == [{"eval_loss", "eval_runtime"}]


# Stop, abort, save.
def checkpoints(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.rglob("*.ckpt"))


STOPS = [("on_step_end", 3), ("on_log", 4), ("on_evaluate", 5), ("on_epoch_end", 5), ("on_step_begin", 2)]


@pytest.mark.parametrize(("event", "step"), STOPS)
def test_a_stop_saves_and_ends(event: str, step: int, tmp_path: Path) -> None:
    ours = Recorder(only=("on_save",))
    made = fit(tmp_path, LightningCallbacks([Asks(event, step, "should_training_stop"), ours], logging_steps=2))
    last = step + (event == "on_step_begin")
    assert made.global_step == last
    assert checkpoints(tmp_path) == [f"checkpoint-{last}.ckpt"]
    assert [told["checkpoint"] for told in ours.of("on_save")] == [str(tmp_path / f"checkpoint-{last}.ckpt")]
    fit(tmp_path / "none", LightningCallbacks([Asks(event, step, "should_training_stop")], save_at_stop=False))
    assert checkpoints(tmp_path / "none") == []


@pytest.mark.parametrize(("event", "step"), [("on_step_end", 3), ("on_log", 4), ("on_evaluate", 5), ("on_save", 5)])
def test_an_abort_saves_and_validates_nothing_more(event: str, step: int, tmp_path: Path) -> None:
    ours = Recorder(only=("on_evaluate", "on_save", "on_train_end"))
    abort = LightningCallbacks([Asks(event, step, "abort"), ours], logging_steps=2)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1 if event != "on_save" else 5, save_top_k=-1)
    made = fit(tmp_path, abort, saves, enable_checkpointing=True, min_epochs=2, max_epochs=3)
    assert made.global_step == step
    last = step if event in ("on_save", "on_evaluate") else step - 1
    assert max(int(name.partition("step=")[2].partition(".")[0]) for name in checkpoints(tmp_path)) == last
    assert [at for name, at in ours.events if name == "on_evaluate"] == ([5] if event == "on_evaluate" else [])
    assert ours.events[-1] == ("on_train_end", step)
    assert any(each is saves for each in made.callbacks)
    assert made.limit_val_batches == 1.0
    assert made.fit_loop.min_epochs == 2


def test_flags_of_callbacks_are_obeyed_and_unsupported_ones_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Recorder(only=("on_save", "on_evaluate", "on_log_step", "on_epoch_end"))
    asks = [Asks("on_forward_backward_end", 1, "should_save"), Asks("on_step_end", 3, "should_log")]
    asks += [Asks("on_step_end", at, "should_evaluate") for at in (1, 2)] + [
        Asks("on_step_end", 4, "should_epoch_stop")
    ]
    made = fit(tmp_path, LightningCallbacks([*asks, ours]))
    assert ours.events == [
        *(("on_save", 2), ("on_log_step", 3), ("on_epoch_end", 4), ("on_evaluate", 9), ("on_epoch_end", 9))
    ]
    assert made.global_step == 9
    assert [each.message for each in caplog.records if "should_evaluate" in each.message] == [
        "should_evaluate ignored: Lightning validates by its own cadence; use Trainer(val_check_interval=)"
    ]


def test_checkpoints_of_lightning_are_reported_when_they_are_written(tmp_path: Path) -> None:
    class Looks(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, int, float | None]] = []

        def on_save(self, state: Any, checkpoint: str, **_: Any) -> None:
            assert Path(checkpoint).is_file()
            self.seen.append((Path(checkpoint).name, state.global_step, state.best_metric))

    ours = Looks()
    saves = ModelCheckpoint(tmp_path, monitor="val_loss", filename="{epoch}", save_top_k=-1)
    made = fit(tmp_path, saves, LightningCallbacks([ours]), enable_checkpointing=True)
    assert [(name, step) for name, step, _ in ours.seen] == [("epoch=0.ckpt", 5), ("epoch=1.ckpt", 10)]
    assert ours.seen[-1][2] == pytest.approx(float(saves.best_model_score or 0))
    assert [type(each).__name__ for each in made.callbacks] == ["LightningCallbacks", "ModelCheckpoint"]


# State.
class Tensors(Counts):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mean": torch.tensor([1.5])}


def test_states_are_in_lightnings_checkpoints_and_come_back(tmp_path: Path) -> None:
    fit(tmp_path, LightningCallbacks([Tensors(), Asks("on_step_end", 7, "stop")], logging_steps=2))
    whole, resumed, ours = Recorder(only=("on_step_end",)), Tensors(), Recorder(only=("on_train_begin", "on_step_end"))
    fit(tmp_path / "whole", LightningCallbacks([whole]))
    made = LightningCallbacks([ours, resumed], logging_steps=2)
    fit(tmp_path, made, ckpt_path=str(tmp_path / "checkpoint-7.ckpt"))
    assert resumed.loaded is not None
    assert resumed.loaded["steps"] == 7
    assert torch.equal(resumed.loaded["mean"], torch.tensor([1.5]))
    assert resumed.steps == 10
    assert ours.events == [("on_train_begin", 7), ("on_step_end", 8), ("on_step_end", 9), ("on_step_end", 10)]
    assert [told["epoch"] for told in ours.of("on_step_end")] == [1.6, 1.8, 2.0]
    steps = [
        each["step"]
        for each in ours.of("on_step_end")[0]["trainer"].callbacks[0]._run.state.log_history
        if "loss" in each
    ]
    assert steps == [2, 4, 6, 8, 10]


def test_an_error_in_a_callback_ends_the_run_and_restores_the_trainer(tmp_path: Path) -> None:
    class Breaks(TrainerCallback):
        is_closed = False

        def on_step_end(self, **_: Any) -> None:
            raise ValueError("broken")

        def close(self) -> None:
            self.is_closed = True

    breaks, model = Breaks(), Line()
    made = trainer(tmp_path, LightningCallbacks([breaks]))
    with pytest.raises(ValueError, match="broken"):
        made.fit(model, loader(), loader())
    assert breaks.is_closed
    assert "save_checkpoint" not in vars(made)
    assert "configure_gradient_clipping" not in vars(model)


def test_tokens_are_counted_and_it_is_lightnings_callback(tmp_path: Path) -> None:
    ours = Recorder(only=("on_log", "on_train_metrics"))
    made = LightningCallbacks([ours], logging_steps=5, count_tokens=lambda batch: batch[0].numel())
    assert isinstance(made, Callback)
    fit(tmp_path, made, accumulate_grad_batches=2, max_epochs=2)
    assert [told["metrics"]["tokens"] for told in ours.of("on_train_metrics")][:3] == [4, 4, 2]
    assert made._run.state.num_input_tokens_seen == 20
