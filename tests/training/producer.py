"""A producer of the tests: it fires a training loop's events through the bus, with given losses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyward.training import CallbackHandler, Ranks, TrainerControl, TrainerState

__all__ = ["Producer", "RunArgs"]


@dataclass(kw_only=True)
class RunArgs:
    """Arguments that callbacks may read as `args`."""

    logging_dir: str | None = None
    output_dir: str = "out"
    logging_steps: int = 1
    per_device_train_batch_size: int = 8


@dataclass
class Producer:
    """One run. `resume` before `begin` is what a trainer does with a checkpoint."""

    callbacks: list[Any]
    logging_dir: Path | None = None
    max_steps: int = 10
    ranks: Ranks | None = None
    context: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.handler = CallbackHandler(self.callbacks, ranks=self.ranks)
        self.args = RunArgs(logging_dir=None if self.logging_dir is None else str(self.logging_dir))
        self.state = TrainerState(max_steps=self.max_steps, train_batch_size=8)
        self.state.is_world_process_zero = self.handler.ranks.rank == 0
        self.control = TrainerControl()

    def fire(self, event: str, **context: Any) -> None:
        self.handler.fire(
            event, args=self.args, state=self.state, control=self.control, **{"model": None, **self.context, **context}
        )

    def resume(self, checkpoint: Mapping[str, Any]) -> None:
        self.state.global_step = checkpoint["global_step"]
        self.state.epoch = checkpoint["epoch"]
        self.handler.load_state_dict(checkpoint["callbacks"])

    def begin(self) -> None:
        self.fire("on_init_end")
        self.fire("on_train_begin")

    def step(self, *, tokens: int = 0, **logs: Any) -> dict[str, Any]:
        """Make one step, which ends with a log of `logs` if there are any. Returns the logs as callbacks left them."""
        self.fire("on_step_begin")
        self.fire("on_train_metrics", metrics={"loss": logs.get("loss"), "tokens": tokens})
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self.max_steps
        self.state.num_input_tokens_seen += tokens
        self.fire("on_step_end")
        if logs:
            self.log(logs)
        return logs

    def log(self, logs: dict[str, Any]) -> None:
        self.fire("on_log_step", logs=logs)
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs=logs)

    def evaluate(self, *, batches: int = 0, as_hugging_face_does: bool = False, **metrics: Any) -> None:
        for _ in range(batches):
            self.fire("on_prediction_step")
        if as_hugging_face_does:
            self.log({**metrics, "epoch": self.state.epoch})
        self.fire("on_evaluate", metrics=metrics)

    def save(self) -> Any:
        """Return a checkpoint as it comes back from a disk."""
        checkpoint = {
            "global_step": self.state.global_step,
            "epoch": self.state.epoch,
            "callbacks": self.handler.state_dict(),
        }
        self.fire("on_save", checkpoint="checkpoint")
        return json.loads(json.dumps(checkpoint))

    def end(self, **summary: Any) -> None:
        self.log({"train_runtime": 1.5, "train_loss": 2.0, **summary})
        self.fire("on_train_end")
        self.handler.close()
