"""Probes under the Trainers of transformers and Lightning, with our callbacks for them."""

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
    TrainerCallback,
    WeightNormLogger,
)
from tests.training.probes.test_in_the_trainer import LM, rows
from tests.training.probes.tiny_lm import Characters


class Seen(TrainerCallback):
    """Callback that keeps the gradients of each step as the optimizer gets them."""

    def __init__(self) -> None:
        self.gradients: dict[int, dict[str, float]] = {}

    def on_pre_optimizer_step(self, state: Any, model: Any, **kwargs: Any) -> None:
        self.gradients[state.global_step + 1] = {
            name: float(each.grad.norm()) for name, each in model.named_parameters() if each.grad is not None
        }


def check(folder: Path, steps: list[int], seen: Seen) -> None:
    gradients = json.loads((folder / "logs" / "gradient_norms.json").read_text())
    assert [each["global_step"] for each in gradients] == steps
    for each in gradients:
        assert each["grad_norms"] == pytest.approx(seen.gradients[each["global_step"]], rel=1e-5)
    parameters = json.loads((folder / "logs" / "parameter_norms.json").read_text())
    assert [each["global_step"] for each in parameters] == steps
    assert (folder / "logs" / "profiler" / "trace_rank0.json").exists()


def probes() -> list[TrainerCallback]:
    return [
        WeightNormLogger(),
        GradNormLogger(),
        ParameterNormLogger(),
        PeakMemory(),
        ProfilerCallback(start_step=1, num_steps=2, with_stack=False),
    ]


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [({"eval_strategy": "epoch"}, [8, 16]), ({"eval_strategy": "steps", "eval_steps": 6}, [6, 12, 16])],
)
def test_probes_work_under_huggingfaces_trainer(tmp_path: Path, strategy: dict[str, Any], steps: list[int]) -> None:
    transformers = pytest.importorskip("transformers")
    from skyward.training.frameworks.hf.callbacks import HFCallbacks

    seen, text = Seen(), TextgenCallback(prompts=["ab"], max_new_tokens=3)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **strategy,
    )
    trainer = transformers.Trainer(
        model=LM(),
        args=args,
        train_dataset=rows(64),
        eval_dataset=rows(8),
        callbacks=[HFCallbacks([*probes(), text, seen])],
    )
    trainer.processing_class = trainer.callback_handler.processing_class = Characters()
    trainer.train()
    check(tmp_path, steps, seen)
    history = [each for each in trainer.state.log_history if "loss" in each]
    assert all(each["weight_norm"] > 0 and len(each["peak_rss"]) == 1 for each in history)
    assert text.texts[0].startswith("ab [START] ")


@pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize(
    ("chosen", "steps"), [({}, [16, 32]), ({"val_check_interval": 4, "limit_train_batches": 8}, [4, 8, 12, 16])]
)
def test_probes_work_under_lightnings_trainer(tmp_path: Path, chosen: dict[str, Any], steps: list[int]) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from skyward.training.frameworks.lightning.callbacks import LightningCallbacks

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]  # Any to mypy here
        def __init__(self) -> None:
            super().__init__()
            self.lm = LM()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.lm(**batch)["loss"]

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.lm(**batch)["loss"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    seen = Seen()
    data: Any = rows(64)
    trainer = lightning.Trainer(
        default_root_dir=tmp_path,
        max_epochs=2,
        gradient_clip_val=0.01,
        callbacks=[LightningCallbacks([*probes(), seen], logging_steps=1)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **chosen,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer.fit(Module(), loader, loader)
    check(tmp_path, steps, seen)
    assert sum(norm**2 for norm in seen.gradients[4].values()) ** 0.5 <= 0.0101  # clipped
