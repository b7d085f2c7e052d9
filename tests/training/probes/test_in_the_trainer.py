"""All probes at once under our Trainer: their output, and that a run with them trains the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.training import (
    GradNormLogger,
    ParameterNormLogger,
    PeakMemory,
    ProfilerCallback,
    TextgenCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    WeightNormLogger,
)
from tests.training.probes.tiny_lm import ALPHABET, Characters, TinyLM


class LM(TinyLM):
    """Language model with a loss, as trainers want it."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(input_ids)
        if labels is None:
            return {"logits": logits}
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(1, len(ALPHABET), (count, 12), generator=generator)
    return [{"input_ids": each, "labels": each} for each in found.unbind()]


def probes() -> list[TrainerCallback]:
    return [
        WeightNormLogger(),
        GradNormLogger(),
        ParameterNormLogger(power_iter_steps=1),
        PeakMemory(),
        TextgenCallback(prompts=["ab"], max_new_tokens=4, generation_steps=4),
        ProfilerCallback(start_step=1, num_steps=2, with_stack=False),
    ]


def trainer(folder: Path, callbacks: list[Any], **args: Any) -> Trainer:
    chosen = {
        "max_steps": 8,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "use_cpu": True,
        "disable_tqdm": True,
        **args,
    }
    torch.manual_seed(0)
    return Trainer(
        model=LM(),
        args=TrainingArguments(output_dir=folder, **chosen),
        train_dataset=rows(64),
        eval_dataset=rows(8),
        processing_class=Characters(),
        callbacks=callbacks,
    )


def losses(trained: Trainer) -> list[Any]:
    return [each["loss"] for each in trained.state.log_history if "loss" in each]


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "logs" / name).read_text())
    for each in found:
        del each["timestamp"]
    return found


def test_a_run_with_probes_trains_like_one_without_and_resumes_to_the_bit(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", [])
    plain.train()
    whole = trainer(tmp_path / "whole", probes())
    whole.train()
    assert losses(whole) == losses(plain)
    assert all(each["weight_norm"] > 0 for each in whole.state.log_history if "loss" in each)
    for name in ("gradient_norms.json", "parameter_norms.json"):
        assert [each["global_step"] for each in records(tmp_path / "whole", name)] == [2, 4, 6, 8]
    assert (tmp_path / "whole" / "logs" / "profiler" / "trace_rank0.json").exists()

    class Killed(TrainerCallback):
        def on_step_end(self, state: Any, **kwargs: Any) -> None:
            if state.global_step == 7:
                raise KeyboardInterrupt

    cut = trainer(tmp_path / "cut", [*probes(), Killed()])
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    resumed = trainer(tmp_path / "cut", probes())
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(plain)
    for name in ("gradient_norms.json", "parameter_norms.json"):
        assert records(tmp_path / "cut", name) == records(tmp_path / "whole", name)
    texts = [
        next(each for each in one.callback_handler if isinstance(each, TextgenCallback)) for one in (whole, resumed)
    ]
    assert texts[0].texts == texts[1].texts != []


def test_a_run_that_raises_closes_files_of_probes(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_end(self, state: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        trainer(tmp_path, [ProfilerCallback(start_step=1, num_steps=50, with_stack=False), Failing()]).train()
    assert json.loads((tmp_path / "logs" / "profiler" / "trace_rank0.json").read_text())["traceEvents"]
