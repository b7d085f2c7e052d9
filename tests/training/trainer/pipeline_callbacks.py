"""The view of callbacks on a model that lies on several ranks, one stage on each: cases for real ranks."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skyward.training import (
    GradNormLogger,
    InfoCallback,
    ParameterNormLogger,
    PipelineTrainer,
    TextgenCallback,
    Trainer,
    TrainingArguments,
    WeightNormLogger,
)
from skyward.training.checkpoint import checkpoints_in
from skyward.training.evaluation import AsyncEvaluation
from tests.training.checkpoint.crew import error_of
from tests.training.probes.tiny_lm import ALPHABET, Characters

SETTINGS: dict[str, Any] = {
    "num_train_epochs": 2,
    "per_device_train_batch_size": 6,
    "per_device_eval_batch_size": 5,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "learning_rate": 0.05,
    "disable_tqdm": True,
    "use_cpu": True,
}


class Language(nn.Module):
    """Model tokens: (B, T) int64 -> logits (B, T, vocabulary), of the mean of the tokens so far."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block_size = 8
        self.embed = nn.Embedding(len(ALPHABET), 6)
        self.mix = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(0.5))
        self.head = nn.Linear(10, len(ALPHABET))

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.mix(averaged(self.embed(tokens))))


class First(nn.Module):
    """First stage with its own name for the part of the model."""

    def __init__(self, model: Language) -> None:
        super().__init__()
        self.table = model.embed

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.table(tokens)


class Last(nn.Module):
    def __init__(self, model: Language) -> None:
        super().__init__()
        self.mix, self.out = model.mix, model.head
        self.fails_at = 0

    def forward(self, hidden: torch.Tensor) -> Any:
        if hidden.shape[1] == self.fails_at:
            raise OSError("no space left")
        return self.out(self.mix(averaged(hidden)))


def averaged(hidden: torch.Tensor) -> torch.Tensor:
    counts = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
    return hidden.cumsum(1) / counts[None, :, None]


def split(model: nn.Module, stages: int) -> list[nn.Module]:
    assert isinstance(model, Language)
    return [nn.Sequential(First(model), Last(model))] if stages == 1 else [First(model), Last(model)]


def cross_entropy(logits: Any, labels: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def rows(size: int) -> list[dict[str, torch.Tensor]]:
    draws = torch.Generator().manual_seed(5)
    made = [torch.randint(1, len(ALPHABET), (8,), generator=draws) for _ in range(size)]
    return [{"tokens": each, "labels": each.roll(-1)} for each in made]


def trainer_of(kind: type[Trainer], folder: Path, callbacks: list[Any], **options: Any) -> Trainer:
    """Make a trainer without the dropout, which each rank draws for itself."""
    args = SETTINGS | options.pop("args", {})
    model = Language()
    model.mix[2].p = options.pop("dropout", 0.0)
    if kind is PipelineTrainer:
        options = {"model_splitter": split} | options
    return kind(
        model,
        TrainingArguments(folder, **args),
        train_dataset=rows(18),
        eval_dataset=rows(7),
        compute_loss_func=cross_entropy,
        processing_class=Characters(),
        callbacks=callbacks,
        **options,
    )


def observed(kind: type[Trainer], folder: Path, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """Return the observations of every callback that looks into the model."""
    info, text = io.StringIO(), TextgenCallback(prompts=["ab", "hello"], max_new_tokens=9)
    loggers = [WeightNormLogger(), GradNormLogger(), ParameterNormLogger(), text]
    made = trainer_of(kind, folder, [*loggers, InfoCallback(True, output_stream=info)], **options)
    made.train(resume_from_checkpoint=resume)
    return {
        "weight_norms": [each["weight_norm"] for each in made.state.log_history if "weight_norm" in each],
        "gradients": records(folder / "logs" / "gradient_norms.json"),
        "parameters": records(folder / "logs" / "parameter_norms.json"),
        "info": info.getvalue(),
        "texts": text.texts,
    }


def records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    kept = ("global_step", "grad_norms", "norms", "spectral_norms")
    return [{name: each[name] for name in kept if name in each} for each in json.loads(path.read_text())]


# Cases ----------------------------------------------------------------------------------------------------------------


def what_is_observed_of_a_pipeline(ranks: Any, folder: Path) -> Any:
    return observed(PipelineTrainer, folder)


def what_is_observed_goes_on(ranks: Any, folder: Path) -> Any:
    whole = observed(PipelineTrainer, folder / "whole")
    first = checkpoints_in(folder / "whole")[0]
    assert first.step == 2
    resumed = observed(PipelineTrainer, folder / "resumed", first.path)
    gone_on = records(folder / "whole" / "logs" / "parameter_norms.json")  # a resumed run goes on in its own file
    return whole["parameters"], gone_on, whole["texts"], resumed["texts"]


def a_frozen_stage(ranks: Any, folder: Path) -> Any:
    """Train with a frozen first stage. Its gradients do not exist, and the other's are written."""
    info = io.StringIO()
    callbacks = [GradNormLogger(), InfoCallback(output_stream=info)]
    made = trainer_of(PipelineTrainer, folder, callbacks, args={"max_steps": 2})
    if ranks.rank == 0:
        made.model.requires_grad_(False)
        made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
    made.train()
    return [sorted(each["grad_norms"]) for each in records(folder / "logs" / "gradient_norms.json")], info.getvalue()


def a_stage_that_fails_while_text_is_made(ranks: Any, folder: Path) -> Any:
    text = TextgenCallback(prompts=["ab"], max_new_tokens=5)
    quiet = InfoCallback(output_stream=io.StringIO())
    made = trainer_of(PipelineTrainer, folder, [text, quiet], args={"save_strategy": "no", "max_steps": 4})
    if isinstance(made.model, Last):
        made.model.fails_at = 4
    made.train()
    tokens = torch.tensor([[1, 2, 3]])
    return (
        made.state.global_step,
        text.texts,
        error_of(lambda: made.pipeline_generate(tokens, max_new_tokens=3)),  # type: ignore[attr-defined]
        made.pipeline_generate(tokens[:, :1], max_new_tokens=2, do_sample=False).shape,  # type: ignore[attr-defined]
        error_of(lambda: made.pipeline_generate(tokens[0], max_new_tokens=3)),  # type: ignore[attr-defined]
        made.model.training,
    )


def an_evaluation_beside_a_pipeline(ranks: Any, folder: Path) -> Any:
    beside = AsyncEvaluation(Language, lambda model, payload: {}, None, eval_strategy="steps", eval_steps=1)
    return error_of(trainer_of(PipelineTrainer, folder, [beside], args={"max_steps": 2}).train)


def a_sequential_and_columns(ranks: Any, folder: Path) -> Any:
    """Train a sequential with columns: from a data set of rank 0, and from a loader whose batches are unknown."""
    told = []
    ways: list[Any] = [rows(8), torch.utils.data.DataLoader(rows(8), batch_size=4)]  # type: ignore[arg-type]
    for data in ways:
        args = TrainingArguments(folder, max_steps=1, use_cpu=True, save_strategy="no", disable_tqdm=True)
        made = PipelineTrainer(
            nn.Sequential(nn.Embedding(len(ALPHABET), 4), nn.Linear(4, len(ALPHABET))),
            args,
            train_dataset=data,
            model_splitter=lambda model, stages: [nn.Sequential(each) for each in model.children()],
            compute_loss_func=cross_entropy,
            callbacks=[InfoCallback(output_stream=io.StringIO())],
        )
        told.append(error_of(made.train))
    return told


ON_TWO = [
    a_sequential_and_columns,
    what_is_observed_of_a_pipeline,
    what_is_observed_goes_on,
    a_frozen_stage,
    a_stage_that_fails_while_text_is_made,
    an_evaluation_beside_a_pipeline,
]


def what_is_observed_of_two_pipelines(ranks: Any, folder: Path) -> Any:
    return observed(PipelineTrainer, folder, num_stages=2, args={"per_device_train_batch_size": 3})
