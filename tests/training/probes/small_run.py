"""A producer of the tests: a few steps of a real model, every event at its place, clipped gradients."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skyward.training import CallbackHandler, Ranks, TrainerControl, TrainerState


@dataclass(kw_only=True)
class Args:
    """The `args` that every producer has."""

    output_dir: str
    logging_dir: str | None
    max_steps: int = 6
    logging_steps: int = 1
    eval_steps: int = 2
    save_steps: int = 2
    eval_strategy: str = "steps"
    save_strategy: str = "steps"
    load_best_model_at_end: bool = False
    gradient_accumulation_steps: int = 1


class SmallNet(nn.Module):
    """Model with every kind of norm: a convolution, a matrix, vectors, a parameter of zeros, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4 * 6 * 6, 3)
        self.adapter = nn.Parameter(torch.zeros(3, 3))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.conv(images)).relu())
        logits: Tensor = self.head(hidden.flatten(1))
        return logits + logits @ self.adapter


class SmallRun:
    """Training on images of a fixed seed. `checkpoint()` returns a checkpoint's contents."""

    def __init__(
        self,
        folder: Path,
        callbacks: Iterable[object],
        *,
        model: nn.Module | None = None,
        ranks: Ranks | None = None,
        epoch_steps: int = 4,
        processing_class: Any = None,
        evaluates_also_at: tuple[int, ...] = (),
        **args: Any,
    ) -> None:
        torch.manual_seed(0)
        self.args = Args(**{"output_dir": str(folder), "logging_dir": str(folder / "logs"), **args})
        self.state = TrainerState(
            max_steps=self.args.max_steps, eval_steps=self.args.eval_steps, logging_steps=self.args.logging_steps
        )
        self.control = TrainerControl()
        self.model = model if model is not None else SmallNet()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.handler = CallbackHandler(callbacks, ranks=ranks)
        self.processing_class = processing_class
        self.epoch_steps, self.evaluates_also_at = epoch_steps, evaluates_also_at
        self.losses: list[float] = []
        self.gradients: dict[int, dict[str, float]] = {}

    def fire(self, event: str, **more: Any) -> None:
        self.handler.fire(
            event,
            args=self.args,
            state=self.state,
            control=self.control,
            model=self.model,
            optimizer=self.optimizer,
            processing_class=self.processing_class,
            train_dataloader=range(self.epoch_steps),
            trainer=self,
            **more,
        )

    def train(self, *, dies_at: int | None = None) -> SmallRun:
        """Train. In step `dies_at` it raises, with no further event except `close`, as a producer does."""
        try:
            self.fire("on_init_end")
            self.fire("on_train_begin")
            while self.state.global_step < self.args.max_steps:
                self._step(dies_at)
            self.fire("on_train_end")
        finally:
            self.handler.close()
        return self

    def checkpoint(self) -> dict[str, Any]:
        return {
            "model": deepcopy(self.model.state_dict()),
            "optimizer": deepcopy(self.optimizer.state_dict()),
            "callbacks": self.handler.state_dict(),
            "step": self.state.global_step,
            "random": torch.get_rng_state(),
        }

    def resume(self, checkpoint: dict[str, Any]) -> SmallRun:
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.handler.load_state_dict(checkpoint["callbacks"])
        self.state.global_step = checkpoint["step"]
        torch.set_rng_state(checkpoint["random"])
        return self

    def _step(self, dies_at: int | None) -> None:
        self.fire("on_step_begin")
        step = self.state.global_step + 1
        self.model.train()
        images, labels = batch(step)
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        if step == dies_at:
            raise RuntimeError("out of memory")
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.gradients[step] = {
            name: float(each.grad.norm()) for name, each in self.model.named_parameters() if each.grad is not None
        }
        self.fire("on_pre_optimizer_step")
        self.optimizer.step()
        self.fire("on_optimizer_step")
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.state.global_step = step
        self.state.epoch = step / self.epoch_steps
        self.fire("on_step_end")
        self._after_step(step, loss.item())
        self.handler.agree(self.control)

    def _after_step(self, step: int, loss: float) -> None:
        if step % self.args.logging_steps == 0:
            logs: dict[str, Any] = {"loss": loss}
            self.fire("on_log_step", logs=logs)
            self.state.log_history.append({**logs, "step": step})
            self.fire("on_log", logs=logs)
        every = self.epoch_steps if self.args.eval_strategy == "epoch" else self.args.eval_steps
        if (self.args.eval_strategy != "no" and step % every == 0) or step in self.evaluates_also_at:
            self.fire("on_evaluate", metrics={"eval_loss": loss})


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 1, 6, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
