"""Policy of a run's checkpoints: when it saves, which ones it keeps, and where it resumes."""

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


class CheckpointManager:
    """Save at a cadence, keep the newest and the best checkpoints, and resume.

    All ranks create it, and call its methods at the same steps. It is a context manager, and closes itself.

    Args:
        coordinator: writes and loads the checkpoints; it needs an `output_dir`.
        save_steps: save after this many steps, >= 1; None: not by steps.
        save_s: save after this many seconds by rank 0's clock; None: not by time.
        save_total_limit: number of checkpoints to keep, >= 1; None: all. The newest, the newest finite one and the best
            are always kept.
        metric: name among the `metrics` of `save` that ranks checkpoints; None: no checkpoint counts as best.
        greater_is_better: direction of the metric. None: False if its name contains "loss", "perplexity" or "error".
        keep_best: number of best checkpoints to keep.
        asynchronous: write in a thread while training continues.
        handle_sigterm: on SIGTERM, to this process or that of another rank, make `step` write an emergency checkpoint
            and raise RunTerminated.
        grace_s: seconds that this emergency save may take after the signal. Use less than the scheduler grants.

    Raises:
        UsageError: an argument is out of range, or the coordinator has no `output_dir`.

    Example:
        with CheckpointManager(coordinator, save_steps=100, save_total_limit=3) as manager:
            manager.resume()
            for step in range(1, 1001):
                loss = train_step()
                manager.step(step, metrics={"loss": loss})
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
                raise UsageError(f"{name}={value!r}: must be >= 1, or None; set {name}=1 or more")
        if coordinator.output_dir is None:
            raise UsageError("coordinator=...: has no output_dir; make it with CheckpointCoordinator(output_dir=...)")
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
        """Save if it is time; call this at the end of every step. Collective.

        Args:
            step: number of the step that has just ended.
            metrics: as in `save`.
            is_finite: returns what `save` takes as `is_finite`; called only if it saves.

        Returns:
            Whether it saved.

        Raises:
            RunTerminated: an emergency save has ended.
            Exception: the error of an earlier asynchronous save.
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
        """Save now. Collective.

        Args:
            step: number of the step, which names the checkpoint.
            metrics: values for the manifest; the manager's `metric` among them ranks the checkpoint.
            is_needed: never leave this save out, as `on_busy="skip"` of the coordinator could. A checkpoint with the
                metric is never left out either.
            is_finite: whether the last loss and the weights are finite: a bool, or a tensor of one. None: the metrics
                with "loss" in their names decide. If it is False on any rank, `resume` skips the checkpoint.

        Returns:
            Whether it saved.

        Raises:
            Exception: the error of an earlier asynchronous save; with `asynchronous=False` also of this one.
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
        """Load a checkpoint and return its report. Collective.

        Args:
            where: True or "latest": the newest finite checkpoint; a number: that of this step; another text: that at
                this path; None or False: none.
            strict: as in `CheckpointCoordinator.load_checkpoint`.

        Returns:
            The report; None if no checkpoint was wanted, or if the newest was wanted and there is none.

        Raises:
            CheckpointNotFound: no checkpoint of that step, or at that path. Other errors are those of
                `CheckpointCoordinator.load_checkpoint`: a damaged checkpoint is never skipped silently.

        Example:
            report = manager.resume()
            first = 0 if report is None else report.step
        """
        if where is None or where is False:
            return None
        if where is True or where == "latest":
            latest = self.coordinator.latest()
            return None if latest is None else self.coordinator.load_checkpoint(latest, strict)
        if isinstance(where, str):
            return self.coordinator.load_checkpoint(where, strict)
        paths = together(self.coordinator.ranks, f"looking for step {where}", lambda: self._path_of(where))
        path = paths[self.coordinator.ranks.rank]
        if path is None:
            raise CheckpointNotFound(
                f"where={where!r}: no checkpoint of this step in {self._output_dir!r}; use one of {self._steps()}",
                path=self._output_dir,
            )
        return self.coordinator.load_checkpoint(path, strict)

    def best(self) -> str | None:
        """Return the path of the best checkpoint by `metric`; None if none has that metric."""
        ranking = self._best()
        return ranking[0].path if ranking else None

    def close(self) -> None:
        """Wait for the pending save, and raise its error. It can be called twice."""
        if self._termination is not None:
            self._termination.close()
        self.coordinator.close()

    # -----------------------------------------------------------------------------------------------------------------

    def _would_be_best(self, metrics: Mapping[str, float] | None) -> bool:
        """Return whether the save counts as needed: any with the metric does, because a look at the disk is slow."""
        return self._metric is not None and metrics is not None and self._metric in metrics

    def _best(self) -> list[FoundCheckpoint]:
        if self._metric is None:
            return []
        return best_of(checkpoints_in(self._output_dir), self._metric, greater_is_better=self._greater)

    def _prune(self, committed: str) -> None:
        """Delete old checkpoints. Runs in the thread of the save."""
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
    """Save model, optimizer, scheduler and random generators, in addition to the loop's own saves.

    A checkpoint whose last loss or weights are not finite does not count as the newest, and never displaces the last
    finite one. With several ranks, model and optimizer are compared and must be equal on all ranks. If each rank has
    its own, pass `pattern=SharingPattern.PER_RANK`.

    Args:
        output_dir: parent of the folders `checkpoint-<step>`, a path or a URL.
        save_steps: save after this many steps, >= 1.
        save_total_limit: number of checkpoints to keep, >= 1; None: all.
        resume: load the newest checkpoint at the start. The position in the data belongs to the loop: a framework that
            skips batches on resume continues exactly only with its own resume.
        extra: further components.
        pattern: sharing pattern of model, optimizer and scheduler.
        asynchronous: write in a thread while training continues.

    Example:
        trainer = Trainer(model, args, callbacks=[CheckpointCallback("out", save_steps=100, save_total_limit=3)])
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
