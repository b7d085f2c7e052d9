"""skyward's checkpoints in Hugging Face's and Lightning's trainers, and in a plain loop with a StatefulDataLoader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.training import HFCallbacks
from skyward.training.adapters.lightning_io import lightning_checkpoint_io
from skyward.training.checkpoint import (
    CheckpointCallback,
    CheckpointCoordinator,
    RNGState,
    checkpoints_in,
    latest_checkpoint,
    problems,
)
from tests.training.checkpoint.states import Box, part, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def test_a_plain_loop_resumes_in_the_middle_of_an_epoch_to_the_bit(tmp_path: Path) -> None:
    """Resume model, optimizer, schedule, scaler, generators and a shuffled StatefulDataLoader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    data: Any = torch.randn(20, 3)

    def everything(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
            "scaler": torch.amp.GradScaler("cpu"),
            "dataset": StatefulDataLoader(data, batch_size=2, shuffle=True),
            "rng": RNGState(),
        }

    def coordinator(parts: dict[str, Any]) -> CheckpointCoordinator:
        return CheckpointCoordinator([part(key, each, "per_rank") for key, each in parts.items()], output_dir=tmp_path)

    def train(parts: dict[str, Any], save_at: int | None = None, *, resumes: bool = False) -> list[float]:
        losses = []
        saves = coordinator(parts)
        if resumes:
            saves.load_checkpoint(skip=["rng"])
        batches = iter(parts["dataset"])  # it draws a seed: the generators come after it
        if resumes:
            saves.load_checkpoint(only=["rng"])
        for step, batch in enumerate(batches, start=1):
            loss = parts["model"](batch).square().mean()
            parts["scaler"].scale(loss).backward()
            parts["scaler"].step(parts["optimizer"])
            parts["scaler"].update()
            parts["scheduler"].step()
            parts["optimizer"].zero_grad()
            losses.append(loss.item())
            if step == save_at:
                saves.save_checkpoint_async(checkpoint_id=step)
        saves.close()
        return losses

    whole = train(everything(1), save_at=4)
    assert train(everything(2), resumes=True) == whole[4:]


def test_hugging_faces_trainer_saves_with_our_callback(tmp_path: Path) -> None:
    import transformers

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": ((self.a * x - labels) ** 2).mean()}

    model = Line()
    saves = CheckpointCallback(tmp_path / "ours", save_steps=2, save_total_limit=2)
    args = transformers.TrainingArguments(
        str(tmp_path / "hf"), max_steps=5, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    data = [{"x": torch.tensor([float(x)]), "labels": torch.tensor([2.0 * x])} for x in range(16)]
    transformers.Trainer(model, args, train_dataset=data, callbacks=[HFCallbacks([saves])]).train()
    found = checkpoints_in(tmp_path / "ours")
    assert [each.step for each in found] == [4, 5]
    assert problems(found[-1].path) == []
    fresh = Line()
    CheckpointCoordinator([part("model", fresh, "replicated")]).load_checkpoint(found[-1].path)
    assert same(fresh.state_dict(), model.state_dict())


def test_a_hugging_face_run_that_diverges_keeps_the_last_finite_checkpoint(tmp_path: Path) -> None:
    import transformers

    class Breaks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.ones(1))
            self.steps = 0

        def forward(self, x: Any, labels: Any) -> Any:
            self.steps += 1
            return {"loss": ((self.a * x - labels) ** 2).mean() * (1 if self.steps < 4 else float("nan"))}

    saves = CheckpointCallback(tmp_path / "ours", save_steps=1, save_total_limit=1)
    args = transformers.TrainingArguments(
        str(tmp_path / "hf"), max_steps=6, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    data = [{"x": torch.tensor([float(x)]), "labels": torch.tensor([2.0 * x])} for x in range(16)]
    transformers.Trainer(Breaks(), args, train_dataset=data, callbacks=[HFCallbacks([saves])]).train()
    assert [each.step for each in checkpoints_in(tmp_path / "ours")] == [3, 6]
    assert latest_checkpoint(tmp_path / "ours") == str(tmp_path / "ours" / "checkpoint-3")


def test_lightning_writes_and_resumes_through_our_commit(tmp_path: Path) -> None:
    import lightning

    class Line(lightning.LightningModule):  # type: ignore[misc]  # it is Any to mypy here
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, index: int) -> Any:
            return ((self.a * batch - 2 * batch) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    def trained(epochs: int, **fit: Any) -> Any:
        trainer = lightning.Trainer(
            max_epochs=epochs,
            default_root_dir=tmp_path,
            plugins=[lightning_checkpoint_io()],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Line()
        data: Any = torch.arange(8.0)
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4), **fit)
        return trainer, model

    trainer, model = trained(1)
    path = trainer.checkpoint_callback.best_model_path
    assert problems(path) == []
    whole = trained(2)[1]
    resumed, again = trained(2, ckpt_path=path)
    assert resumed.global_step == 4
    assert same(again.state_dict(), whole.state_dict())
    assert not same(again.state_dict(), model.state_dict())


def test_the_callback_resumes(tmp_path: Path) -> None:
    from skyward.training import Alone

    box = Box({"weight": torch.ones(2)})
    first = CheckpointCallback(tmp_path, save_steps=1)
    first.on_train_begin(ranks=Alone(), model=box)
    first.on_train_end(state=_State(7))
    fresh = Box(None)
    CheckpointCallback(tmp_path, resume=True).on_train_begin(ranks=Alone(), model=fresh)
    assert same(fresh.state, box.state)


class _State:
    def __init__(self, step: int) -> None:
        self.global_step = step
