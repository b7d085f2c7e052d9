"""Cases of two ranks under the Trainers of Hugging Face and of Lightning. `tests/training/conftest.py` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments  # noqa: F401  # loads what is lazy, once for both ranks

from skyward.training import DefaultMetrics, DivergenceDetector, RankFailed, TrainerCallback
from skyward.training.frameworks.hf.callbacks import HFCallbacks
from skyward.training.frameworks.lightning.callbacks import LightningCallbacks
from tests.training.checkpoint.crew import Case
from tests.training.frameworks.recording import Asks, Recorder

WORLD = 2


class Breaks(TrainerCallback):
    """Callback that raises on one rank only, while the other goes on."""

    def on_log(self, state: Any, ranks: Any, **_: Any) -> None:
        if ranks.rank == 1 and state.global_step == 2:
            raise OSError("disk full")


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": ((self.a * x - labels) ** 2).mean()}


class LogsAlone(Trainer):  # type: ignore[misc]  # it is Any to mypy here
    """A user's trainer that logs within a step, on rank 0 only."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_world_process_zero():
            self.log({"mine": 1.0})
        return super().compute_loss(*args, **kwargs)


class LosesANumber(Trainer):  # type: ignore[misc]
    """Model that has no loss on rank 1 from step 2 on."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        return loss if self.is_world_process_zero() or self.state.global_step < 2 else loss * float("nan")


def hf(folder: Path, *callbacks: Any, kind: Any = Trainer, **chosen: Any) -> Any:
    given: dict[str, Any] = {"num_train_epochs": 2, "logging_steps": 1, "save_strategy": "steps", **chosen}
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        **given,
    )
    data = [{"x": torch.tensor([i / 10]), "labels": torch.tensor([i / 5])} for i in range(24)]
    made = kind(Line(), args, train_dataset=data, callbacks=[HFCallbacks(callbacks)])
    made.remove_callback(transformers.PrinterCallback)
    try:
        made.train()
    except (OSError, RankFailed) as error:
        return f"{type(error).__name__}: {error}"
    return made.state.global_step


class Module(LightningModule):  # type: ignore[misc]  # it is Any to mypy here
    def __init__(self) -> None:
        super().__init__()
        self.line = Line()

    def training_step(self, batch: Any) -> Any:
        return self.line(batch[0], 2 * batch[0])["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def lightning(folder: Path, *callbacks: Any, **chosen: Any) -> Any:
    made = LightningTrainer(
        default_root_dir=str(folder),
        max_epochs=2,
        accelerator="cpu",
        strategy="ddp",
        devices=WORLD,
        callbacks=[LightningCallbacks(callbacks, logging_steps=1)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **chosen,
    )
    try:
        made.fit(Module(), DataLoader(TensorDataset(torch.arange(24.0)[:, None] / 10), batch_size=2))
    except (OSError, RankFailed) as error:
        return f"{type(error).__name__}: {error}"
    return made.global_step


def files(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.glob("checkpoint-*"))


def hf_stops_where_one_rank_asks(ranks: Any, folder: Path) -> Any:
    return [hf(folder, Asks("on_step_end", 3, "stop", rank=1)), files(folder)]


def hf_stops_within_a_step_at_its_end(ranks: Any, folder: Path) -> Any:
    asks = Asks("on_substep_end", 1, "should_training_stop", rank=1)
    return [hf(folder, asks, gradient_accumulation_steps=2), files(folder)]


def hf_aborts_where_one_rank_asks(ranks: Any, folder: Path) -> Any:
    return [hf(folder, Asks("on_log", 3, "abort", rank=1), save_steps=2), files(folder)]


def hf_raises_on_all(ranks: Any, folder: Path) -> Any:
    return hf(folder, Breaks())


def hf_logs_of_one_rank_hold_up_nobody(ranks: Any, folder: Path) -> Any:
    ours = Recorder(only=("on_log",))
    steps = hf(folder, DefaultMetrics(), DivergenceDetector(), ours, kind=LogsAlone, max_steps=2, save_strategy="no")
    return [steps, sum(1 for told in ours.of("on_log") if "mine" in told["logs"])]


def hf_tells_all_ranks_that_one_has_no_loss(ranks: Any, folder: Path) -> Any:
    ours = Recorder(only=("on_log",))
    steps = hf(folder, DivergenceDetector(threshold=100.0, action="abort"), ours, kind=LosesANumber)
    return [steps, [str(told["logs"]["loss"]) == "nan" for told in ours.of("on_log") if "loss" in told["logs"]]]


def lightning_stops_where_one_rank_asks(ranks: Any, folder: Path) -> Any:
    return [lightning(folder, Asks("on_step_end", 3, "stop", rank=1)), files(folder)]


def lightning_aborts_where_one_rank_asks(ranks: Any, folder: Path) -> Any:
    return [lightning(folder, Asks("on_log", 3, "abort", rank=1)), files(folder)]


def lightning_raises_on_all(ranks: Any, folder: Path) -> Any:
    return lightning(folder, Breaks())


def lightning_logs_the_mean_of_all_ranks(ranks: Any, folder: Path) -> Any:
    ours = Recorder(only=("on_log", "on_train_metrics"))
    lightning(folder, DefaultMetrics(), ours, use_distributed_sampler=True)
    logged = [told["logs"].get("loss") for told in ours.of("on_log")][:3]
    return [logged, [float(told["metrics"]["loss"]) for told in ours.of("on_train_metrics")][:3]]


CASES: list[Case] = [
    hf_stops_where_one_rank_asks,
    hf_stops_within_a_step_at_its_end,
    hf_aborts_where_one_rank_asks,
    hf_raises_on_all,
    hf_logs_of_one_rank_hold_up_nobody,
    hf_tells_all_ranks_that_one_has_no_loss,
    lightning_stops_where_one_rank_asks,
    lightning_aborts_where_one_rank_asks,
    lightning_raises_on_all,
    lightning_logs_the_mean_of_all_ranks,
]
