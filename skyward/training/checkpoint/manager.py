"""When a run saves, what it keeps, and where it goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from ...errors import CheckpointNotFound, UsageError
from ..agree import Ranks
from ..events import TrainerCallback
from .coordinator import CheckpointCoordinator
from .finite import is_finite
from .layout import FoundCheckpoint, checkpoints_in
from .load import LoadReport
from .patterns import SharingPattern, StateComponent
from .retention import best_of, prune_or_warn
from .rng import RNGState
from .termination import RunTerminated, Termination
from .verdicts import together

__all__ = ["CheckpointCallback", "CheckpointManager"]


class CheckpointManager:
    """Saves by a cadence, keeps the newest and the best, resumes. All ranks make it and call it at the same steps.

    save_steps, save_s: save after so many steps, after so many seconds (by rank 0's clock); None: not by itself.
    save_total_limit: how many checkpoints stay, at least 1; None: all. The newest, the newest finite one and the best
        stay in any case.
    metric: the name among the `metrics` of `save` that says which are best; keep_best: how many of those stay.
    greater_is_better: None says: unless the metric's name has "loss", "perplexity" or "error" in it.
    asynchronous: write behind training.
    grace_s: after a SIGTERM (of this process or of any other rank's, where `handle_sigterm`): how long an emergency
        save may take from then; `step` makes it and raises RunTerminated. Give less than the scheduler does.
    """

    def __init__(
        self,
        coordinator: CheckpointCoordinator,
        *,
        save_steps: int | None = None,
        save_s: float | None = None,
        save_total_limit: int | None = None,
        metric: str | None = None,
        greater_is_better: bool | None = None,
        keep_best: int = 1,
        asynchronous: bool = True,
        handle_sigterm: bool = False,
        grace_s: float = 25.0,
    ) -> None:
        for name, value in (("save_steps", save_steps), ("save_total_limit", save_total_limit)):
            if value is not None and value < 1:
                raise UsageError(f"{name}={value!r}: at least 1, or None")
        if coordinator.output_dir is None:
            raise UsageError("CheckpointManager: its coordinator needs an output_dir")
        self.coordinator = coordinator
        self._output_dir = coordinator.output_dir
        self._save_steps, self._save_s, self._limit = save_steps, save_s, save_total_limit
        self._metric, self._greater, self._keep_best = metric, greater_is_better, keep_best
        self._is_asynchronous = asynchronous
        self._last_save = time.monotonic()
        self._last_step: int | None = None
        self._termination = Termination(grace_s=grace_s, option="handle_sigterm") if handle_sigterm else None
        if self._termination is not None:
            self._termination.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def step(
        self, step: int, *, metrics: Mapping[str, float] | None = None, is_finite: Callable[[], Any] | None = None
    ) -> bool:
        """At the end of every step: save where it is time. Give whether it did. Collective.

        metrics, is_finite: as `save` takes them; the latter is called where it saves.
        Raises: what an asynchronous save has; RunTerminated after an emergency save.
        """
        self.coordinator.poll()
        ranks = self.coordinator.ranks
        is_due = self._save_steps is not None and step % self._save_steps == 0
        termination = self._termination
        if self._save_s is not None or termination is not None:
            by_clock = ranks.rank == 0 and self._save_s is not None
            is_time = by_clock and time.monotonic() - self._last_save >= (self._save_s or 0.0)
            is_noticed = termination is not None and termination.is_noticed
            bits = ranks.flags((1 if is_time else 0) | (2 if is_noticed else 0))
            if termination is not None and bits & 2:
                path = termination.save_in_time(
                    step,
                    is_saved=self._last_step == step,
                    wait=self.coordinator.wait,
                    save=lambda: self.save(step, is_needed=True, is_finite=is_finite and is_finite()),
                )
                raise RunTerminated(path)
            is_due = is_due or bool(bits & 1)
        return is_due and self.save(step, metrics=metrics, is_finite=is_finite and is_finite())

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        is_needed: bool = False,
        is_finite: Any = None,
    ) -> bool:
        """Save now. Give whether it did.

        metrics: kept with it; `metric` among them says how good it is. is_needed: never left out, as the coordinator's
            `on_busy="skip"` could, nor is one that is the best so far.
        is_finite: whether the last loss and the weights are, as a bool or a tensor of one; None: as the metrics with
            "loss" in their names say. Where it is not, on any rank, `resume` passes the checkpoint over.
        """
        is_needed = is_needed or self._would_be_best(metrics)
        about = {"step": step, "is_finite": is_finite, **({"metrics": dict(metrics)} if metrics else {})}
        self._last_save = time.monotonic()
        is_begun = self.coordinator.save_checkpoint_async(
            checkpoint_id=step, is_needed=is_needed, metadata=about, after=self._prune
        )
        if is_begun:
            self._last_step = step
            if not self._is_asynchronous:
                self.coordinator.wait()
        return is_begun

    def resume(self, where: str | int | bool | None = True, *, strict: bool = True) -> LoadReport | None:
        """Loads the newest finite one (True), that of a step (a number), or that at a path. Collective.

        None where the newest is asked for and there is none, and where `where` is None or False.
        Raises: as `CheckpointCoordinator.load_checkpoint`: a checkpoint that cannot be trusted is never passed over
        in silence.
        """
        if where is None or where is False:
            return None
        if where is True or where == "latest":
            latest = self.coordinator.latest()
            return None if latest is None else self.coordinator.load_checkpoint(latest, strict)
        if isinstance(where, str):
            return self.coordinator.load_checkpoint(where, strict)
        found = together(self.coordinator.ranks, f"looking for step {where}", lambda: self._path_of(where))
        path = found[self.coordinator.ranks.rank]
        if path is None:
            raise CheckpointNotFound(
                f"output_dir={self._output_dir!r}: no checkpoint of step {where}; there are {self._steps()}",
                path=self._output_dir,
            )
        return self.coordinator.load_checkpoint(path, strict)

    def best(self) -> str | None:
        """The path of the best by `metric`; None where none has it."""
        found = self._best()
        return found[0].path if found else None

    def close(self) -> None:
        """Waits for the pending save. Raises: what it has. May be called again."""
        if self._termination is not None:
            self._termination.close()
        self.coordinator.close()

    # -----------------------------------------------------------------------------------------------------------------

    def _would_be_best(self, metrics: Mapping[str, float] | None) -> bool:
        """Without asking for the disk: a save with the metric counts as wanted."""
        return self._metric is not None and metrics is not None and self._metric in metrics

    def _best(self) -> list[FoundCheckpoint]:
        if self._metric is None:
            return []
        return best_of(checkpoints_in(self._output_dir), self._metric, greater_is_better=self._greater)

    def _prune(self, committed: str) -> None:
        """In the thread of the save."""
        if self._limit is not None and self.coordinator.files.is_leader:
            prune_or_warn(
                self._output_dir,
                keep=self._limit,
                protect=lambda: [committed, *(checkpoint.path for checkpoint in self._best()[: self._keep_best])],
            )

    def _steps(self) -> list[int | None]:
        return [checkpoint.step for checkpoint in checkpoints_in(self._output_dir)]

    def _path_of(self, step: int) -> str | None:
        return next(
            (checkpoint.path for checkpoint in checkpoints_in(self._output_dir) if checkpoint.step == step), None
        )


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
            StateComponent(key, stateful, self._pattern, validate_replication=is_compared and key != "scheduler")
            for key, stateful in parts
            if stateful is not None
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
