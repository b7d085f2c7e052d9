"""skyward's callbacks under the real Trainer of transformers."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments
from transformers import TrainerCallback as HFTrainerCallback

from skyward.training import (
    EVENTS,
    CallbackHandler,
    DefaultMetrics,
    DivergenceDetector,
    JsonLogger,
    ProgressCallback,
    TrainerCallback,
)
from skyward.training.evaluation import AsyncEvaluation
from skyward.training.frameworks.hf.callbacks import HFCallbacks
from tests.training.events import scalars_in, without_tensorflow
from tests.training.frameworks.recording import Adds, Asks, Counts, Recorder

without_tensorflow()  # tensorboard would load it

HFS_OWN = [
    event
    for event in EVENTS
    if event not in ("on_forward_backward_begin", "on_forward_backward_end", "on_train_metrics", "on_log_step")
]


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": ((self.a * x - labels) ** 2).mean(), "logits": self.a * x}


DATA = [{"x": torch.tensor([i / 10]), "labels": torch.tensor([i / 5])} for i in range(12)]


def trainer(folder: Path, *callbacks: Any, model: torch.nn.Module | None = None, **chosen: Any) -> Trainer:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
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
    return Trainer(
        model=model or Line(),
        args=TrainingArguments(output_dir=str(folder), **given),
        train_dataset=DATA,
        eval_dataset=DATA[:4],
        callbacks=list(callbacks),
    )


class HFRecorder(HFTrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        for event in HFS_OWN:
            setattr(self, event, self._handler(event))

    def _handler(self, event: str) -> Any:
        def handler(args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if event == "on_log" and any(name.startswith("eval_") for name in logs):
                return  # reported once to us
            self.events.append((event, state.global_step))

        return handler


CADENCES: list[dict[str, Any]] = [
    {},
    {"gradient_accumulation_steps": 4},
    {"eval_strategy": "steps", "eval_steps": 4},
    {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
    {"save_strategy": "steps", "save_steps": 5, "logging_steps": 3, "max_steps": 8},
    {"logging_strategy": "epoch", "max_grad_norm": 0.0},
]


@pytest.mark.parametrize("chosen", CADENCES, ids=str)
def test_events_that_hf_has_are_hfs_own(chosen: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = Recorder(), HFRecorder()
    trainer(tmp_path, HFCallbacks([ours]), theirs, **chosen).train()
    assert [each for each in ours.events if each[0] in HFS_OWN] == theirs.events
    assert len(theirs.events) > 20


def test_ours_come_between_those_of_hf(tmp_path: Path) -> None:
    ours = Recorder()
    trainer(tmp_path, HFCallbacks([ours]), gradient_accumulation_steps=2, max_steps=1).train()
    assert ours.names() == [
        *("on_init_end", "on_train_begin", "on_epoch_begin", "on_step_begin"),
        *("on_forward_backward_begin", "on_forward_backward_end", "on_substep_end"),
        *("on_forward_backward_begin", "on_forward_backward_end"),
        *("on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log_step", "on_log"),
        *("on_epoch_end", "on_log", "on_train_end"),
    ]


def checkpoints(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.glob("checkpoint-*"))


# Pitfall 1: HF reports an evaluation twice.
def test_an_evaluation_is_reported_once(tmp_path: Path) -> None:
    ours = Recorder(only=("on_log", "on_evaluate"))
    made = trainer(tmp_path, HFCallbacks([ours]), eval_strategy="steps", eval_steps=4, max_steps=8)
    made.train()
    assert Counter(ours.events)["on_evaluate", 4] == 1
    assert not [told for told in ours.of("on_log") if "eval_loss" in told["logs"]]
    assert [told["metrics"]["eval_loss"] for told in ours.of("on_evaluate")] == [
        entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry
    ]
    made.evaluate(metric_key_prefix="test")
    assert ours.names()[-1] == "on_evaluate"
    assert "test_loss" in ours.of("on_evaluate")[-1]["metrics"]
    assert not [told for told in ours.of("on_log") if "test_loss" in told["logs"]]


# Pitfall 2: an epoch ends before it is evaluated.
def test_an_epoch_ends_before_its_evaluation(tmp_path: Path) -> None:
    ours = Recorder(only=("on_epoch_end", "on_evaluate", "on_save"))
    trainer(tmp_path, HFCallbacks([ours]), eval_strategy="epoch", save_strategy="epoch").train()
    assert ours.names() == ["on_epoch_end", "on_evaluate", "on_save"] * 2
    assert [told["epoch"] for told in ours.of("on_evaluate")] == [1.0, 2.0]
    assert [Path(told["checkpoint"]).name for told in ours.of("on_save")] == ["checkpoint-6", "checkpoint-12"]
    assert all(Path(told["checkpoint"]).is_dir() for told in ours.of("on_save"))


# Pitfall 3: HF has logged before its callbacks hear of it.
def test_values_added_by_callbacks_reach_the_history_and_hfs_integrations(tmp_path: Path) -> None:
    ours, after = Recorder(only=("on_log",)), HFCallbacks([Adds(), Recorder()])
    after.callbacks.add(ours)
    made = trainer(tmp_path, after, report_to=["tensorboard"], max_steps=3)
    names = [type(each).__name__ for each in made.callback_handler.callbacks]
    assert names[:3] == ["DefaultFlowCallback", "HFCallbacks", "TensorBoardCallback"]
    made.train()
    assert [entry["ours"] for entry in made.state.log_history if "loss" in entry] == [10.0, 20.0, 30.0]
    assert [told["logs"]["ours"] for told in ours.of("on_log")[:3]] == [10.0, 20.0, 30.0]
    (events,) = {each.parent for each in tmp_path.rglob("events.out.*") if each.stat().st_size}
    assert scalars_in(events)["train/ours"] == [(1, 10.0), (2, 20.0), (3, 30.0)]


def test_logs_of_steps_with_a_train_runtime_are_no_summaries(tmp_path: Path) -> None:
    stream = io.StringIO()
    ours = HFCallbacks([DefaultMetrics(), ProgressCallback(output_stream=stream), JsonLogger()])
    made = trainer(tmp_path, ours, max_steps=2, include_num_input_tokens_seen=True)
    made.model.main_input_name = "x"
    made.train()
    records = json.loads((tmp_path / "logs" / "trainer_logs.json").read_text())
    steps = [each for each in records if "loss" in each]
    assert ["train_runtime" in each and each["tok_per_sec"] > 0 for each in steps] == [True, True]
    assert stream.getvalue().count("training has ended") == 1


def test_values_added_by_callbacks_are_written_as_json(tmp_path: Path) -> None:
    class AddsATensor(TrainerCallback):
        def on_log_step(self, logs: dict[str, Any], **_: Any) -> None:
            logs["tensor"] = torch.tensor(2.5)

    trainer(tmp_path, HFCallbacks([AddsATensor()]), save_strategy="steps", save_steps=1, max_steps=2).train()
    kept = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert [entry["tensor"] for entry in kept["log_history"]] == [2.5, 2.5]


# Pitfall 4: HF's stop saves nothing, and it has no abort.
STOPS = [
    ("on_step_end", 3, "steps"),
    ("on_log", 3, "epoch"),
    ("on_epoch_end", 6, "steps"),
    ("on_step_begin", 3, "epoch"),
    ("on_train_begin", 0, "steps"),
]


@pytest.mark.parametrize(("event", "step", "strategy"), STOPS)
def test_a_stop_saves_the_last_state(event: str, step: int, strategy: str, tmp_path: Path) -> None:
    made = trainer(tmp_path, HFCallbacks([Asks(event, step, "should_training_stop")]), save_strategy=strategy)
    made.train()
    last = {"on_step_begin": step + 1, "on_train_begin": 1}.get(event, step)  # the step that has begun is ended
    assert made.state.global_step == last
    assert checkpoints(tmp_path) == [f"checkpoint-{last}"]


def test_a_stop_at_an_evaluation_saves_though_only_the_best_are_saved(tmp_path: Path) -> None:
    stop = Asks("on_evaluate", 4, "stop")
    chosen: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best"}
    made = trainer(tmp_path, HFCallbacks([stop]), metric_for_best_model="loss", learning_rate=0.0, **chosen)
    made.train()
    assert made.state.global_step == 4
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4"]  # 4 is no better than 2


def test_a_stop_saves_nothing_if_nothing_is_saved(tmp_path: Path) -> None:
    trainer(tmp_path, HFCallbacks([Asks("on_log", 3, "should_training_stop")])).train()
    assert checkpoints(tmp_path) == []


class SavesAlways(HFTrainerCallback):  # type: ignore[misc]
    """HF callback behind ours that requests a checkpoint wherever it can."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_training_stop:
            control.should_save = control.should_evaluate = True

    on_step_end = on_log = on_evaluate = on_save = on_epoch_end


ABORTS = [
    ("on_step_end", 3, "steps", ["checkpoint-2"]),
    ("on_log", 4, "best", ["checkpoint-2"]),
    ("on_evaluate", 4, "best", ["checkpoint-2"]),
    ("on_epoch_end", 6, "epoch", []),
    ("on_save", 4, "steps", ["checkpoint-2", "checkpoint-4"]),
]


@pytest.mark.parametrize(("event", "step", "strategy", "saved"), ABORTS)
def test_an_abort_saves_and_evaluates_nothing_whatever_is_requested(
    event: str, step: int, strategy: str, saved: list[str], tmp_path: Path
) -> None:
    ours = Recorder(only=("on_evaluate", "on_epoch_end", "on_train_end"))
    every: dict[str, Any] = {
        "eval_strategy": "epoch" if strategy == "epoch" else "steps",
        "eval_steps": 2,
        "save_steps": 2,
    }
    abort = HFCallbacks([Asks(event, step, "abort"), ours])
    made = trainer(tmp_path, abort, save_strategy=strategy, metric_for_best_model="loss", **every)
    made.add_callback(SavesAlways())
    made.train()
    assert made.state.global_step == step
    assert checkpoints(tmp_path) == saved
    assert ours.events[-2:] == [("on_epoch_end", step), ("on_train_end", step)]
    assert [at for name, at in ours.events if name == "on_evaluate"][-1:] == {
        "on_step_end": [2], "on_log": [2], "on_evaluate": [4], "on_epoch_end": [], "on_save": [4]
    }[event]  # fmt: skip


def test_a_trainer_that_was_aborted_can_train_again(tmp_path: Path) -> None:
    ours = HFCallbacks([Asks("on_step_end", 3, "abort")])
    made = trainer(tmp_path, ours, save_strategy="epoch")
    made.train()
    ours.callbacks.pop(Asks)
    made.train()
    assert checkpoints(tmp_path) == ["checkpoint-12", "checkpoint-6"]


def test_flags_of_callbacks_are_hfs(tmp_path: Path) -> None:
    ours = Recorder(only=("on_save", "on_evaluate", "on_log", "on_epoch_end"))
    asks = [Asks("on_step_begin", 1, "should_save"), Asks("on_step_end", 3, "should_evaluate")]
    asks += [Asks("on_step_end", 4, "should_epoch_stop"), Asks("on_step_end", 2, "should_log")]
    trainer(tmp_path, HFCallbacks([*asks, ours]), logging_steps=100, num_train_epochs=1).train()
    # HF logs, evaluates, saves. The log at the end is that of the whole run.
    first = [("on_log", 2), ("on_save", 2), ("on_evaluate", 3), ("on_epoch_end", 4), ("on_log", 4)]
    assert ours.events == first


# State, both ways.
class Tensors(Counts):
    def state_dict(self) -> dict[str, Any]:
        mean = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
        kept = {"mean": mean, "scale": torch.tensor(3), "at": (1, "a"), "by_step": {7: b"bytes"}, "nan": float("nan")}
        return {**super().state_dict(), **kept}


@pytest.mark.parametrize("hf_restores", [False, True])
def test_states_are_in_hfs_checkpoints_and_come_back(hf_restores: bool, tmp_path: Path) -> None:
    counts, tensors = Counts(), Tensors()
    chosen: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    chosen |= {"metric_for_best_model": "loss", "restore_callback_states_from_checkpoint": hf_restores}
    early = EarlyStoppingCallback(early_stopping_patience=50)
    trainer(tmp_path, HFCallbacks([counts, tensors, early]), max_steps=8, **chosen).train()
    assert early.early_stopping_patience_counter == 0  # it becomes better and better

    resumed, again, alone = Counts(), Tensors(), EarlyStoppingCallback(early_stopping_patience=50)
    recorder = Recorder(only=("on_init_end", "on_train_begin", "on_step_end"))
    ours = HFCallbacks([recorder, resumed, again, alone])
    made = trainer(tmp_path, ours, max_steps=12, report_to=["tensorboard"], **chosen)
    kept = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    attributes = kept["stateful_callbacks"]["HFCallbacks"]["attributes"]["exported"]
    attributes["EarlyStoppingCallback"]["attributes"]["early_stopping_patience_counter"] = 3
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text(json.dumps(kept))
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.loaded == {"steps": 4}
    assert resumed.steps == 12
    assert again.loaded is not None
    assert torch.equal(again.loaded["mean"], torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert torch.equal(again.loaded["scale"], torch.tensor(3))
    assert again.loaded["at"] == (1, "a")
    assert again.loaded["by_step"] == {7: b"bytes"}
    assert again.loaded["nan"] != again.loaded["nan"]
    assert alone.early_stopping_patience_counter == 0  # was 3 till the next evaluation, which was better
    assert recorder.events == [("on_init_end", 0), ("on_train_begin", 4), *(("on_step_end", at) for at in range(5, 13))]
    names = [type(each).__name__ for each in made.callback_handler.callbacks]
    assert names[:3] == ["DefaultFlowCallback", "HFCallbacks", "TensorBoardCallback"]  # HF had put it at the end
    assert any(each is ours for each in made.callback_handler.callbacks)


def test_a_run_made_without_ours_can_be_resumed_with_them(tmp_path: Path) -> None:
    trainer(tmp_path, save_strategy="steps", save_steps=4, max_steps=4).train()
    counts = Counts()
    made = trainer(tmp_path, HFCallbacks([counts]), save_strategy="steps", save_steps=4, max_steps=8)
    made.train(resume_from_checkpoint=True)
    assert counts.steps == 4
    assert (
        "HFCallbacks"
        in json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())["stateful_callbacks"]
    )


def test_callbacks_get_the_documented_context(tmp_path: Path) -> None:
    ours = Recorder(only=("on_step_end", "on_log"))
    made = trainer(tmp_path, HFCallbacks([ours]), max_steps=2)
    made.train()
    told = ours.of("on_step_end")[0]
    assert told["trainer"] is made
    assert told["model"] is made.model
    assert told["args"].output_dir == str(tmp_path)
    assert told["args"].logging_dir == str(tmp_path / "logs")
    assert told["args"].max_steps == 2
    assert told["optimizer"] is not None
    assert told["lr_scheduler"] is not None
    assert len(told["train_dataloader"]) == 6
    assert [told["epoch"] for told in ours.of("on_step_end")] == [1 / 6, 2 / 6]


def test_events_that_hf_does_not_have_are_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    waits, has_others = Recorder(only=("on_train_metrics",)), Recorder(only=("on_train_metrics", "on_log"))
    trainer(tmp_path, HFCallbacks([waits, has_others]), max_steps=1).train()
    said = "Hugging Face's Trainer passes a loss only when it logs; use on_log"
    assert [each.message for each in caplog.records if "on_train_metrics" in each.message] == [
        f"Recorder is never called here: no on_train_metrics: {said}"
    ]


def test_an_error_in_a_callback_ends_the_run_or_is_ignored(tmp_path: Path) -> None:
    class Breaks(TrainerCallback):
        def on_step_end(self, state: Any, **_: Any) -> None:
            raise ValueError(f"at {state.global_step}")

    with pytest.raises(ValueError, match="at 1") as caught:
        trainer(tmp_path, HFCallbacks([Breaks()])).train()
    assert caught.value.__notes__ == ["raised in the callback Breaks.on_step_end at rank 0"]
    breaks, ours = Breaks(), Recorder(only=("on_step_end",))
    breaks.on_error = "disable"
    trainer(tmp_path, HFCallbacks([breaks, ours]), max_steps=3).train()
    assert len(ours.events) == 3


def test_it_is_hfs_callback_and_holds_a_handler(tmp_path: Path) -> None:
    one, other = HFCallbacks([Counts()]), HFCallbacks()
    assert isinstance(one, HFTrainerCallback)
    assert isinstance(one, HFCallbacks)
    assert isinstance(one.callbacks, CallbackHandler)
    assert len(one.callbacks) == 1
    assert len(other.callbacks) == 0
    assert type(one)() is one
    assert type(other)() is other


def test_evaluation_beside_training_is_reported_at_the_scored_step(tmp_path: Path) -> None:
    def score(model: Line, data: torch.Tensor) -> dict[str, float]:
        return {"loss": float((model.a.detach() * data).sum())}

    evaluation = AsyncEvaluation(Line, score, torch.ones(2), eval_strategy="steps", eval_steps=5, gate="sync")
    run = trainer(tmp_path, HFCallbacks([evaluation]))
    run.train()
    assert [(each.step, each.status) for each in evaluation.history] == [(5, "ok"), (10, "ok")]
    rows = [row["step"] for row in run.state.log_history if "eval_loss" in row]
    assert rows == [5, 10]


class Diverging(Line):
    """Model whose loss is not finite in these forward passes of a training.

    With `spoils`, its gradients are not either.
    """

    def __init__(self, steps: range, *, spoils: bool) -> None:
        super().__init__()
        self.steps, self.spoils, self.passes = steps, spoils, 0

    def forward(self, x: Any, labels: Any) -> Any:
        out = super().forward(x, labels)
        self.passes += self.training
        if self.training and self.passes in self.steps:
            out["loss"] = out["loss"] * float("nan") if self.spoils else out["loss"] + float("inf")
        return out


def test_a_loss_that_the_filter_hides_reaches_our_callbacks_as_no_number(tmp_path: Path) -> None:
    ours, theirs = Recorder(), HFLogs()
    model = Diverging(range(4, 5), spoils=True)
    callbacks = HFCallbacks([Adds(), JsonLogger(), ours])
    made = trainer(tmp_path, callbacks, theirs, model=model, num_train_epochs=1, logging_steps=2)
    made.train()
    losses = [told["logs"]["loss"] for told in ours.of("on_log") if "loss" in told["logs"]]
    assert [math.isnan(loss) for loss in losses] == [False, False, True]  # the second interval began with a number
    shown = [each["loss"] for each in made.state.log_history if "loss" in each]
    assert shown == theirs.losses
    assert all(math.isfinite(loss) for loss in shown)
    assert all(each["ours"] for each in made.state.log_history if "loss" in each)
    written = [each["loss"] for each in json.loads((tmp_path / "logs" / "trainer_logs.json").read_text())[:3]]
    assert written[2] is None
    assert "training_step" not in vars(made)


def test_single_losses_that_are_not_finite_are_hidden_as_in_our_trainer(tmp_path: Path) -> None:
    ours = Recorder()
    model = Diverging(range(3, 4), spoils=False)
    made = trainer(tmp_path, HFCallbacks([ours]), model=model, num_train_epochs=1, logging_steps=2)
    made.train()
    losses = [told["logs"]["loss"] for told in ours.of("on_log") if "loss" in told["logs"]]
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("shows", [True, False])
def test_a_diverging_run_is_ended_whatever_the_filter_shows(tmp_path: Path, shows: bool) -> None:
    chosen: dict[str, Any] = {"num_train_epochs": 20, "logging_nan_inf_filter": not shows}
    model = Diverging(range(4, 10**6), spoils=True)
    made = trainer(tmp_path, HFCallbacks([DivergenceDetector(threshold=100.0)]), model=model, **chosen)
    made.train()
    assert made.state.global_step == 4


def test_a_custom_training_step_is_wrapped_and_restored_after_a_run_that_raised(tmp_path: Path) -> None:
    class Breaks(TrainerCallback):
        def on_log(self, **_: Any) -> None:
            if not raised:
                raised.append(True)
                raise OSError("disk full")

    raised: list[bool] = []
    made = trainer(tmp_path, HFCallbacks([Breaks(), DivergenceDetector(action="abort")]), num_train_epochs=1)
    given = made.training_step = lambda *args, **kwargs: type(made).training_step(made, *args, **kwargs) * float("nan")
    with pytest.raises(OSError, match="disk full"):
        made.train()
    made.train()
    assert made.state.global_step == 1
    assert made.training_step is given


class HFLogs(HFTrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def test_events_that_only_hf_has_are_no_misspelt_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Theirs(HFTrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None: ...

        def on_push_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None: ...

    CallbackHandler([Theirs()])
    assert caplog.text == ""
