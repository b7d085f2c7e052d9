"""Hugging Face's Trainer and ours, side by side at one cadence: the same events in the same order, the same numbers."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.trainer_utils import enable_full_determinism, set_seed

from skyward.training import Trainer, TrainerControl, TrainingArguments
from tests.training.trainer.regression import Line, Points, Stream, callback, run

HF_EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_evaluate",
    "on_predict",
    "on_save",
    "on_log",
    "on_prediction_step",
)
COMMON: dict[str, Any] = {
    "learning_rate": 0.1,
    "per_device_train_batch_size": 4,
    "train_sampling_strategy": "sequential",
    "disable_tqdm": True,
    "use_cpu": True,
    "save_strategy": "no",
}


def stop_at(step: int, event: str = "on_step_end", flag: str = "should_training_stop") -> dict[str, Any]:
    def handler(args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step == step:
            setattr(control, flag, True)
        return control

    return {event: handler}


# name: arguments, number of points, flags that a callback sets
CADENCES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "epochs": (
        {"num_train_epochs": 2, "logging_strategy": "epoch", "optim": "adagrad", "optim_args": "lr_decay=0.1,eps=1e-6"},
        20,
        {},
    ),
    "everything by steps": (
        {
            "max_steps": 7,
            "logging_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "save_strategy": "steps",
            "save_steps": 2,
        },
        20,
        {},
    ),
    "everything by epochs": (
        {
            "num_train_epochs": 3,
            "logging_strategy": "epoch",
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "optim": "rmsprop",
            "optim_args": "alpha=0.9, momentum=0.5, eps=1e-6, centered=true",
        },
        20,
        {},
    ),
    "accumulation that does not divide the epoch": (
        {"num_train_epochs": 2, "gradient_accumulation_steps": 3, "logging_steps": 1, "eval_strategy": "epoch"},
        20,
        {},
    ),
    "accumulation by steps, the best model": (
        {
            "max_steps": 5,
            "gradient_accumulation_steps": 2,
            "logging_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 4,
            "load_best_model_at_end": True,
            "save_total_limit": 1,
        },
        20,
        {},
    ),
    "half an epoch, first step logged, delayed evaluation": (
        {
            "num_train_epochs": 1.5,
            "logging_first_step": True,
            "logging_steps": 4,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "eval_delay": 3,
            "eval_on_start": True,
        },
        20,
        {},
    ),
    "shares of all steps": (
        {
            "num_train_epochs": 2,
            "logging_steps": 0.25,
            "eval_strategy": "steps",
            "eval_steps": 0.5,
            "optim": "sgd",
            "optim_args": "momentum=0.9, nesterov=true",
        },
        20,
        {},
    ),
    "saved when it is the best": (
        {
            "max_steps": 6,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "best",
            "logging_steps": 5,
            "metric_for_best_model": "loss",
        },
        20,
        {},
    ),
    "stopped by a callback": ({"num_train_epochs": 3, "logging_steps": 1}, 20, stop_at(7)),
    "stopped while logging": ({"num_train_epochs": 3, "logging_steps": 2}, 20, stop_at(4, "on_log")),
    "stopped by the evaluation": (
        {
            "num_train_epochs": 3,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "eval_accumulation_steps": 2,
        },
        20,
        stop_at(6, "on_evaluate"),
    ),
    "an epoch stopped by a callback": (
        {"num_train_epochs": 2, "logging_strategy": "epoch", "eval_strategy": "epoch"},
        20,
        stop_at(3, flag="should_epoch_stop"),
    ),
    "asked to log, evaluate and save": (
        {"max_steps": 5},
        20,
        stop_at(2, flag="should_log") | stop_at(3, "on_step_begin", "should_evaluate"),
    ),
    "asked to save": ({"max_steps": 5}, 20, stop_at(2, flag="should_save")),
    "fewer samples than a batch": ({"num_train_epochs": 2, "logging_steps": 1}, 3, {}),
}


class HfSpy(transformers.TrainerCallback):  # type: ignore[misc]  # followed as Any
    def __init__(self, seen: list[str], asks: dict[str, Any]) -> None:
        for event in HF_EVENTS:
            setattr(self, event, self._handler(seen, event, asks.get(event)))

    @staticmethod
    def _handler(seen: list[str], event: str, ask: Any) -> Any:
        def handler(args: Any, state: Any, control: Any, **_: Any) -> Any:
            seen.append(event)
            return None if ask is None else ask(args=args, state=state, control=control)

        return handler


def their_run(folder: Path, points: Any, asks: dict[str, Any], **args: Any) -> tuple[list[str], Any]:
    seen: list[str] = []
    theirs = transformers.Trainer(
        Line(),
        transformers.TrainingArguments(output_dir=str(folder), report_to="none", **COMMON | args),
        train_dataset=points,
        eval_dataset=Points(9),
        callbacks=[HfSpy(seen, asks)],
    )
    theirs.remove_callback(transformers.PrinterCallback)
    theirs.train()
    return seen, theirs


def our_run(folder: Path, points: Any, asks: dict[str, Any], **args: Any) -> tuple[list[str], Any]:
    seen: list[str] = []

    def handler(event: str) -> Any:
        def handle(**said: Any) -> Any:
            seen.append(event)
            return asks[event](**said) if event in asks else None

        return handle

    return seen, run(
        folder, data=points, callbacks=[callback(**{event: handler(event) for event in HF_EVENTS})], **COMMON | args
    )


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@pytest.mark.parametrize("name", CADENCES)
def test_events_and_numbers_are_those_of_hugging_face(name: str, tmp_path: Path) -> None:
    args, size, asks = CADENCES[name]
    theirs, their = their_run(tmp_path / "theirs", Points(size), asks, **args)
    ours, our = our_run(tmp_path / "ours", Points(size), asks, **args)
    assert ours == theirs
    compared = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "train_loss", "step")
    assert len(our.state.log_history) == len(their.state.log_history)
    for mine, yours in zip(our.state.log_history, their.state.log_history, strict=True):
        assert {key: mine[key] for key in compared if key in mine} == pytest.approx(
            {key: yours[key] for key in compared if key in yours}, rel=1e-4
        )
    for field in ("global_step", "max_steps", "num_train_epochs", "epoch", "best_metric", "best_global_step",
                  "logging_steps", "save_steps"):  # fmt: skip
        assert getattr(our.state, field) == pytest.approx(getattr(their.state, field)), field
    torch.testing.assert_close(our.model.state_dict(), their.model.state_dict(), rtol=1e-4, atol=1e-5)
    assert sorted(each.name for each in (tmp_path / "ours").glob("checkpoint-*")) == sorted(
        each.name for each in (tmp_path / "theirs").glob("checkpoint-*")
    )


def test_an_iterable_is_read_as_by_hugging_face_but_its_last_partial_step_is_made(tmp_path: Path) -> None:
    args = {"max_steps": 5, "logging_steps": 1}
    theirs, their = their_run(tmp_path / "theirs", Stream(24), {}, **args)
    ours, our = our_run(tmp_path / "ours", Stream(24), {}, **args)
    assert ours == theirs
    assert our.state.log_history[0]["loss"] == pytest.approx(their.state.log_history[0]["loss"], rel=1e-4)
    # 6 batches by 4: the second step has two of them. Hugging Face's forgets them, and counts no step.
    ours, our = our_run(tmp_path / "ours", Stream(24), {}, max_steps=2, gradient_accumulation_steps=4)
    assert our.state.global_step == 2
    assert ours.count("on_epoch_begin") == 1
    assert ours.count("on_step_begin") == ours.count("on_step_end") == 2


SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 2}),
    ("polynomial", {"power": 2.0, "lr_end": 1e-3}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_with_min_lr", {"min_lr": 0.01}),
    ("warmup_stable_decay", {"num_decay_steps": 5}),
    ("warmup_stable_decay", {"num_decay_steps": 5, "warmup_type": "cosine", "decay_type": "1-sqrt",
                             "min_lr_ratio": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 3, 0.2])
def test_schedules_are_those_of_hugging_face(name: str, options: dict[str, Any], warmup: float) -> None:
    from skyward.training.trainer.optimization import make_scheduler

    def rates(make: Any) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        scheduler = make(optimizer)
        found = []
        for _ in range(22):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    args = TrainingArguments(
        lr_scheduler_type=name, lr_scheduler_kwargs=options, warmup_steps=warmup, learning_rate=0.1
    )
    theirs = rates(
        lambda optimizer: transformers.get_scheduler(
            name, optimizer, args.warmup_steps_of(20), 20, scheduler_specific_kwargs=options
        )
    )
    assert rates(lambda optimizer: make_scheduler(optimizer, args, 20)) == pytest.approx(theirs)


def test_names_and_defaults_are_those_of_hugging_face() -> None:
    theirs = transformers.TrainingArguments(output_dir="x", use_cpu=True)
    ours = TrainingArguments(output_dir="x")
    of_ours_alone = {"logging_dir", "dispatch_batches", "async_save", "save_on_busy", "jit_checkpoint_grace_s"}
    derived_from_the_machine = {"disable_tqdm", "use_cpu", "dataloader_pin_memory"}
    assert {field.name for field in dataclasses.fields(TrainingArguments)} >= {
        "label_smoothing_factor", "activation_checkpointing", "activation_checkpointing_kwargs",
        "gradient_checkpointing", "gradient_checkpointing_kwargs", "run_name", "eval_accumulation_steps",
        "full_determinism", "optim_args",
    }  # fmt: skip
    for field in dataclasses.fields(TrainingArguments):
        if field.name in of_ours_alone | derived_from_the_machine:
            continue
        assert hasattr(theirs, field.name), field.name
        assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert {each.name for each in dataclasses.fields(transformers.TrainerControl)} <= {
        each.name for each in dataclasses.fields(TrainerControl)
    }


def test_a_callback_of_hugging_face_stops_our_trainer(tmp_path: Path) -> None:
    # The learning rate is 0, so nothing becomes better.
    stopped = run(
        tmp_path,
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=2)],
        max_steps=10,
        learning_rate=0.0,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
    )
    assert stopped.state.global_step == 3
    assert stopped.state.best_global_step == 1


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"label_smoothing_factor": 0.2, "activation_checkpointing": True,
         "activation_checkpointing_kwargs": {"use_reentrant": False}, "eval_strategy": "steps", "eval_steps": 2},
    ],
)  # fmt: skip
def test_a_language_model_of_hugging_face_has_its_own_losses(more: dict[str, Any], tmp_path: Path) -> None:
    """Labels differ in number and micro-batches are uneven. Both trainers divide by the tokens of the whole step."""
    config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                      num_attention_heads=2, max_position_embeddings=16)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(11):
        tokens = torch.randint(32, (12,), generator=generator)
        rows.append({"input_ids": tokens, "labels": tokens.where(torch.arange(12) > number, torch.tensor(-100))})
    args = {"max_steps": 4, "gradient_accumulation_steps": 2, "logging_steps": 1, "learning_rate": 0.01} | more

    def model() -> Any:
        set_seed(0)
        return transformers.LlamaForCausalLM(config)

    ours = run(tmp_path / "ours", model=model(), data=rows, eval_dataset=rows[:8], **COMMON | args)
    theirs = transformers.Trainer(
        model(),
        transformers.TrainingArguments(output_dir=str(tmp_path / "theirs"), report_to="none", **COMMON | args),
        train_dataset=rows,
        eval_dataset=rows[:8],
    )
    theirs.remove_callback(transformers.PrinterCallback)
    theirs.train()
    for mine, yours in zip(ours.state.log_history[:-1], theirs.state.log_history[:-1], strict=True):
        for key, rel in (("loss", 1e-4), ("grad_norm", 1e-3), ("eval_loss", 1e-4)):
            assert (key in mine) is (key in yours)
            assert key not in mine or mine[key] == pytest.approx(yours[key], rel=rel), key
    assert ours.model.is_activation_checkpointing is theirs.model.is_activation_checkpointing is bool(more)
    assert ours.state.total_flos == pytest.approx(theirs.state.total_flos)
    assert ours.state.num_input_tokens_seen == sum(12 * size for size in (8, 3, 8, 3))


def test_a_gpt2s_loss_is_its_own_mean_where_hugging_faces_trainer_divides_by_one_label_more(tmp_path: Path) -> None:
    """GPT2LMHeadModel leaves out each row's first label, but is not among the classes of which its Trainer knows that.

    So with rows of T labels it logs, and trains on, (T - 1) / T of the loss that the model computes by itself.
    """
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0,
                                     embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)  # fmt: skip
    tokens = torch.randint(32, (4, 12), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    model = transformers.GPT2LMHeadModel(config)
    alone = model(input_ids=tokens, labels=tokens).loss.item()
    args = {"max_steps": 1, "logging_steps": 1, "learning_rate": 0.0}
    ours = run(tmp_path / "ours", model=model, data=rows, **COMMON | args)
    assert ours.state.log_history[0]["loss"] == pytest.approx(alone, rel=1e-5)
    theirs = transformers.Trainer(
        model,
        transformers.TrainingArguments(output_dir=str(tmp_path / "theirs"), report_to="none", **COMMON | args),
        train_dataset=rows,
    )
    theirs.remove_callback(transformers.PrinterCallback)
    theirs.train()
    assert theirs.state.log_history[0]["loss"] == pytest.approx(alone * 11 / 12, rel=1e-5)


def test_a_berts_mean_loss_counts_once_where_hugging_faces_trainer_counts_it_for_each_micro_batch(
    tmp_path: Path,
) -> None:
    """BERT's forward takes **kwargs and drops them, so its loss stays the mean of a micro-batch.

    Here the second has one row of five, and few labels count. The loss and gradient of a step are those of all rows at
    once.
    """
    config = transformers.BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=16, max_position_embeddings=16, hidden_dropout_prob=0,
                                     attention_probs_dropout_prob=0, num_labels=3)  # fmt: skip
    tokens = torch.randint(32, (5, 12), generator=torch.Generator().manual_seed(0))
    masked = tokens.where(torch.arange(12) < torch.tensor([[2], [3], [1], [4], [9]]), torch.tensor(-100))
    classes = torch.tensor([0, 1, 2, 0, 1])
    args = COMMON | {"max_steps": 1, "gradient_accumulation_steps": 2, "logging_steps": 1, "learning_rate": 0.0}
    model: Any = None
    rows: list[Any] = []
    for kind, labels in ((transformers.BertForMaskedLM, masked), (transformers.BertForSequenceClassification, classes)):
        model = kind(config)
        alone = model(input_ids=tokens, labels=labels).loss
        alone.backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
        model.zero_grad()
        rows = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
        ours = run(tmp_path / kind.__name__, model=model, data=rows, **args).state.log_history[0]
        assert ours["loss"] == pytest.approx(alone.item(), rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    theirs = transformers.Trainer(
        model,
        transformers.TrainingArguments(output_dir=str(tmp_path / "theirs"), report_to="none", **args),
        train_dataset=rows[:4] * 2,
    )
    theirs.remove_callback(transformers.PrinterCallback)
    theirs.train()
    mean = model(input_ids=tokens[:4], labels=classes[:4]).loss.item()
    assert theirs.state.log_history[0]["loss"] == pytest.approx(2 * mean, rel=1e-5)


def test_models_that_shift_their_labels_are_recognised_as_by_hugging_face() -> None:
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    from skyward.training.trainer.loss import shifts_labels

    def model(kind: str | None, name: str = "Other", *, encodes: bool = False) -> Any:
        made = type(name, (torch.nn.Module,), {})()
        made.loss_type, made.config = kind, transformers.PretrainedConfig(is_encoder_decoder=encodes)
        return made

    def adapted(inner: Any) -> Any:
        outer = model(None, "PeftModelForCausalLM")
        outer.get_base_model = lambda: inner
        return outer

    for kind, function in LOSS_MAPPING.items():
        assert shifts_labels(model(kind)) is (function is ForCausalLMLoss), kind
        assert not shifts_labels(model(kind, encodes=True))
    for name, shifts in (("GPT2LMHeadModel", True), ("XLNetLMHeadModel", False), ("XLMWithLMHeadModel", False)):
        assert shifts_labels(model(None, name)) is shifts
        assert shifts_labels(adapted(model(None, name))) is shifts
    assert not shifts_labels(Line())


def test_full_determinism_is_that_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC",
             "FLASH_ATTENTION_DETERMINISTIC"}  # fmt: skip

    def after(make: Any) -> Any:
        with monkeypatch.context() as patched:
            for name in names:
                patched.setenv(name, "")
            before = dict(os.environ)
            try:
                make()
                changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
                flags = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
                return changed, flags, torch.backends.cudnn.benchmark, torch.rand(()).item()
            finally:
                torch.use_deterministic_algorithms(False)
                torch.backends.cudnn.deterministic = False

    def ours(**args: Any) -> Any:
        return Trainer(args=TrainingArguments(tmp_path, use_cpu=True, **args), model_init=Line)

    theirs = after(lambda: enable_full_determinism(42))
    assert after(lambda: ours(full_determinism=True)) == theirs
    assert set(theirs[0]) == names
    assert after(ours) == ({}, (False, False), *theirs[2:])
