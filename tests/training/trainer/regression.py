"""A line through points: a model, data and callbacks small enough for many runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skyward.training import EVENTS, Trainer, TrainingArguments

__all__ = ["Line", "Points", "Stream", "callback", "history", "losses", "run", "spy", "trainer"]


class Line(nn.Module):
    """Model y = a x + b. With dropout, so that a run shows which random numbers it drew. x, labels: (B,) float32"""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(0.0))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        y = self.dropout(self.a * x) + self.b
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


class Points(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Points of y = 2 x + 3. `noise` is drawn when a point is read, from torch's own generator."""

    def __init__(self, size: int, *, noise: float = 0.0) -> None:
        self.x = torch.randn(size, generator=torch.Generator().manual_seed(7))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = self.x[index] + (self.noise * torch.randn(()) if self.noise else 0.0)
        return {"x": x, "labels": 2 * self.x[index] + 3}


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The same points, in their order, without a length."""

    def __init__(self, size: int, *, noise: float = 0.0) -> None:
        self.points = Points(size, noise=noise)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.points[index] for index in range(len(self.points)))


def callback(**handlers: Any) -> object:
    """Return an object with these handlers: `callback(on_log=lambda **event: ...)`."""
    made = type("Callback", (), {name: staticmethod(each) for name, each in handlers.items()})
    return made()


def spy(seen: list[str], events: tuple[str, ...] = EVENTS) -> object:
    """Return a callback that notes the name of every event."""
    return callback(**{event: lambda _name=event, **_: seen.append(_name) for event in events})


def trainer(folder: Path | str, *, callbacks: Any = (), data: Any = None, model: Any = None, **args: Any) -> Trainer:
    """Make a quiet trainer on 20 points."""
    options = {name: args.pop(name) for name in ("eval_dataset", "compute_metrics", "optimizers") if name in args}
    settings = {"learning_rate": 0.1, "per_device_train_batch_size": 4, "disable_tqdm": True, "use_cpu": True} | args
    made = Trainer(
        Line() if model is None else model,
        TrainingArguments(output_dir=folder, **settings),
        train_dataset=Points(20) if data is None else data,
        eval_dataset=options.pop("eval_dataset", Points(9)),
        callbacks=callbacks,
        **options,
    )
    for name in ("InfoCallback", "ProgressCallback"):  # they write to the terminal
        for each in list(made.callback_handler):
            if type(each).__name__ == name:
                made.remove_callback(each)
    return made


def run(folder: Path | str, resume: str | bool | None = None, **options: Any) -> Trainer:
    """Make a trainer and train."""
    made = trainer(folder, **options)
    made.train(resume_from_checkpoint=resume)
    return made


_TIMES = ("runtime", "per_second", "tok_per_sec", "mfu")


def history(made: Trainer) -> list[dict[str, Any]]:
    """Return its logs, without values that depend on the clock."""
    return [
        {name: value for name, value in entry.items() if not name.endswith(_TIMES)} for entry in made.state.log_history
    ]


def losses(made: Trainer) -> list[float]:
    """Return the logged losses of training."""
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]
