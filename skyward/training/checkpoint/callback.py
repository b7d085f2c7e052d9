"""Our checkpoints in any training loop that has our callbacks: Hugging Face's, Lightning's, ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..agree import Ranks
from ..events import TrainerCallback
from .coordinator import CheckpointCoordinator
from .finite import is_finite
from .manager import CheckpointManager
from .patterns import SharingPattern, StateComponent
from .rng import RNGState

__all__ = ["CheckpointCallback"]


class CheckpointCallback(TrainerCallback):
    """Saves model, optimizer, schedule, generators and what else is given, beside what the loop itself saves.

    save_steps, save_total_limit: as CheckpointManager's. resume: load the newest at the begin; the loop's own place in
    its data is the loop's: a framework that skips batches when it resumes goes on to the bit with its own resume.
    extra: further components. asynchronous: write behind training.

    A checkpoint whose last loss or weights are not finite does not count as the newest, and never pushes out the last
    finite one.

    In a world of several ranks model and optimizer are compared, and so must be the same on all; give
    `pattern=SharingPattern.PER_RANK` where each rank has its own.
    """

    collective_events = frozenset({"on_train_begin", "on_step_end", "on_train_end"})

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        *,
        save_steps: int = 500,
        save_total_limit: int | None = None,
        resume: bool = False,
        extra: Sequence[StateComponent] = (),
        pattern: SharingPattern = SharingPattern.REPLICATED,
        asynchronous: bool = True,
    ) -> None:
        self.output_dir, self._resume = os.fspath(output_dir), resume
        self._options: dict[str, Any] = {
            "save_steps": save_steps,
            "save_total_limit": save_total_limit,
            "asynchronous": asynchronous,
        }
        self._extra, self._pattern = tuple(extra), pattern
        self.manager: CheckpointManager | None = None
        self._saved_at: int | None = None
        self._is_finite: Callable[[], Any] | None = None
        self._loss: Any = None

    def on_train_begin(
        self, ranks: Ranks, model: Any, optimizer: Any = None, lr_scheduler: Any = None, **kwargs: Any
    ) -> None:
        is_compared = self._pattern is SharingPattern.REPLICATED and ranks.world_size > 1
        parts = [("model", model), ("optimizer", optimizer), ("scheduler", lr_scheduler)]
        components = [
            StateComponent(key, each, self._pattern, validate_replication=is_compared and key != "scheduler")
            for key, each in parts
            if each is not None
        ]
        rng = StateComponent("rng", RNGState(), SharingPattern.PER_RANK, required=False)
        coordinator = CheckpointCoordinator([*components, rng, *self._extra], None, ranks, self.output_dir)
        self.manager = CheckpointManager(coordinator, **self._options)
        self._loss = None
        self._is_finite = lambda: is_finite(model, self._loss)
        if self._resume:
            self.manager.resume()

    def on_train_metrics(self, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        self._loss = metrics.get("loss")

    def on_log(self, logs: Mapping[str, Any], **kwargs: Any) -> None:
        self._loss = logs.get("loss", self._loss)

    def on_step_end(self, state: Any, **kwargs: Any) -> None:
        if self.manager is not None and self.manager.step(state.global_step, is_finite=self._is_finite):
            self._saved_at = state.global_step

    def on_train_end(self, state: Any, **kwargs: Any) -> None:
        if self.manager is None:
            return
        if self._saved_at != state.global_step:
            self.manager.save(state.global_step, is_needed=True, is_finite=self._is_finite and self._is_finite())
        self.manager.close()
