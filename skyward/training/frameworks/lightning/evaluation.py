"""`SakuraLightningCallback`: validations beside a fit of Lightning's.

- When: where Lightning would validate (`check_val_every_n_epoch`, `val_check_interval`); Lightning itself does not.
- What: the module's own `validation_step` and metrics, by a Trainer of the worker (see `validation`).
- Logs: the trainer's loggers get a result with the step at which Lightning would have logged it inline, and
  `callback_metrics` and `logged_metrics` have it from then on.
- Decisions: `EarlyStopping`, `ModelCheckpoint` and plateau schedulers act once for each result (see `monitors`).
- Order: what has ended is told at the end of the next epoch; with drain="lazy" after any batch.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch

from ....errors import UsageError
from ...agree import Ranks
from ...evaluation.best import BestModel, BestValue
from ...evaluation.evaluator import AsyncEvaluator, Drain
from ...evaluation.ranks import Evaluations
from ..evaluations import RunOptions, line_of, row_of_epoch, with_options
from .callbacks import LightningCallbacks
from .monitors import Monitors
from .package import lightning, lightning_package
from .validation import Validation, validate

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback

    from ...evaluation import EvaluationRecord
else:
    Callback = lightning("callbacks").Callback

__all__ = ["SakuraLightningCallback"]


@with_options(RunOptions)
class SakuraLightningCallback(Callback):  # type: ignore[misc]  # its base is Any to mypy here
    """What `SakuraTrainer` does, as a callback of a Trainer of your own.

    Give that Trainer `limit_val_batches=0`, or it validates, too. Arguments and results are `SakuraTrainer`'s;
    val_loader_factory is required, and val_options are arguments of the worker's Trainer (limit_val_batches, ...).
    """

    __module__ = "skyward.training.sakura"

    def __init__(
        self,
        *,
        val_loader_factory: Callable[[], Any],
        model_factory: Callable[[], Any] | None = None,
        val_compute: Any = None,
        model_path: str | os.PathLike[str] | None = None,
        val_options: Mapping[str, Any] | None = None,
        monitor: str = "val_loss",
        mode: Literal["min", "max"] = "min",
        verbose: bool = True,
        drain: Drain = "strict",
        max_age_steps: int | None = None,
        trainable_only: bool | Literal["auto"] = "auto",
        ranks: Ranks | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        if mode not in ("min", "max"):
            raise UsageError(f"mode: {mode!r}; it is 'min' or 'max'")
        self._options = {"compute": val_compute, "drain": drain, **options}
        self._is_lazy, self._is_in_thread, self._ranks = drain == "lazy", val_compute is None, ranks
        self._loader_factory, self._model_factory, self._model_path = val_loader_factory, model_factory, model_path
        self._best = BestValue(monitor, is_greater=mode == "max")
        self._trainable_only, self._val_options = trainable_only, dict(val_options or {})
        self._evaluations = Evaluations(
            type(self).__name__,
            max_age_steps=max_age_steps,
            row=row_of_epoch,
            line=_line if verbose else None,
        )
        self.history, self.records = self._evaluations.history, self._evaluations.records
        self._monitors: Monitors | None = None
        self._asked: dict[int, _Asked] = {}

    # Lightning's events ----------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            raise UsageError("val_check_interval: a time is not possible here; give a number of batches, or a fraction")
        self.close()
        self._asked = {}
        trainable_only = _has_adapters(pl_module) if self._trainable_only == "auto" else self._trainable_only
        self._evaluations.open(
            lambda: self._evaluator(trainer, pl_module), ranks=self._ranks, trainable_only=trainable_only
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._monitors = Monitors(trainer)
        self._monitors.attach()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._watching.hold_schedulers()
        is_due = _is_due_after_batch(trainer, batch_idx)
        if is_due:
            # Lightning counts this batch when its callbacks have had it.
            logger_step = trainer.fit_loop.epoch_loop._batches_that_stepped
            part = (batch_idx + 1) / trainer.num_training_batches
            self._submit(trainer, _Asked(logger_step=logger_step, epochs=trainer.current_epoch + part))
        if is_due or self._is_lazy:
            self._report(trainer, self._evaluations.poll(step=trainer.global_step))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._watching.hold_schedulers()
        if _is_due_after_epoch(trainer):
            logger_step = trainer.fit_loop.epoch_loop._batches_that_stepped - 1
            self._submit(trainer, _Asked(logger_step=logger_step, epochs=trainer.current_epoch + 1.0))
        self._report(trainer, self._evaluations.poll(step=trainer.global_step))
        if _is_last_epoch(trainer):  # other callbacks are told before us that training has ended
            self._report(trainer, self._evaluations.drain(step=trainer.global_step))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._report(trainer, self._evaluations.drain(step=trainer.global_step))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.close()

    # A user's --------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Evaluations that have been asked for, and not been told of yet."""
        return self._evaluations.pending

    @property
    def best_val_loss(self) -> float | None:
        """The best value of `monitor`; None until there is one."""
        return self._best.value

    def close(self) -> None:
        """Ends what this object has started, and gives hooks back. Called when a fit ends, however it ends."""
        if self._monitors is not None:
            self._monitors.detach()
            self._monitors = None
        self._evaluations.close()

    # Within ----------------------------------------------------------------------------------------------------------

    @property
    def _watching(self) -> Monitors:
        if self._monitors is None:
            raise UsageError(f"{type(self).__name__}: no fit is under way")
        return self._monitors

    def _evaluator(self, trainer: Any, module: Any) -> AsyncEvaluator:
        best = None
        if self._model_path is not None:
            best = BestModel(self._model_path, self._best.metric, greater_is_better=self._best.is_greater)
        options: dict[str, Any] = {"precision": trainer.precision}
        if self._is_in_thread and trainer.strategy.root_device.type == "cpu":
            options["accelerator"] = "cpu"
        options |= self._val_options
        return AsyncEvaluator(
            self._model_factory or _factory_of(module),
            validate,
            Validation(loaders=self._loader_factory, options=options, package=lightning_package()),
            **self._options,
            best=best,
            argument_names={"compute": "val_compute", "payload": "val_loader_factory"},
        )

    def _submit(self, trainer: Any, asked: _Asked) -> None:
        step = trainer.global_step
        if step in self._asked:  # batches that are accumulated do not change the weights
            return
        self._asked[step] = asked
        self._watching.asked(step=step)
        self._evaluations.submit(trainer.strategy.model, step=step, epoch=float(trainer.current_epoch))

    def _report(self, trainer: Any, records: list[EvaluationRecord]) -> None:
        for record in records:
            if record.status in ("ok", "late"):
                self._log(trainer, record)
            if record.status == "ok":
                self._decide(trainer, record)
            else:
                self._watching.forget(record.step)

    def _log(self, trainer: Any, record: EvaluationRecord) -> None:
        # What is logged on_step and on_epoch is in callback_metrics under its own name, too.
        plain = {name: value for name, value in record.metrics.items() if f"{name}_epoch" not in record.metrics}
        metrics = {**plain, "epoch": int(record.epoch or 0)}
        for logger in trainer.loggers:
            logger.log_metrics(metrics=metrics, step=self._asked[record.step].logger_step)
            logger.save()

    def _decide(self, trainer: Any, record: EvaluationRecord) -> None:
        self._best.note(record.metrics)
        metrics = {name: torch.tensor(value) for name, value in record.metrics.items()}
        trainer.callback_metrics.update(metrics)
        trainer.logged_metrics.update(metrics)
        self._watching.told(metrics, step=record.step, epoch=int(record.epoch or 0))
        for callback in trainer.callbacks:
            if isinstance(callback, LightningCallbacks):
                epochs = self._asked[record.step].epochs
                callback.evaluated_beside(record.metrics, step=record.step, epoch=epochs)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What is known of a validation when it is asked for."""

    logger_step: int
    """With which Lightning would have logged it."""
    epochs: float
    """That have been trained then."""


def _factory_of(module: Any) -> Callable[[], Any]:
    kind: Any = type(module)
    parameters = inspect.signature(kind).parameters
    known = {name: value for name, value in (getattr(module, "hparams", None) or {}).items() if name in parameters}
    try:
        inspect.signature(kind).bind(**known)
    except TypeError as error:
        raise UsageError(
            f"model_factory: {kind.__name__} cannot be made without arguments ({error}); give a function that makes "
            "it, or call self.save_hyperparameters() in its __init__"
        ) from None
    return partial(kind, **known)


def _has_adapters(module: Any) -> bool:
    """Whether a model of PEFT is in it: then only what is trained travels."""
    return any(hasattr(submodule, "peft_config") for submodule in module.modules())


def _is_last_epoch(trainer: Any) -> bool:
    epochs, steps = trainer.max_epochs, trainer.max_steps
    is_over = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
    return bool(is_over or 0 <= steps <= trainer.global_step or trainer.should_stop)


def _is_due_after_epoch(trainer: Any) -> bool:
    every = trainer.check_val_every_n_epoch
    if every is None or (trainer.current_epoch + 1) % every:
        return False
    return trainer.val_check_batch == float("inf") or _is_once_an_epoch(trainer)


def _is_due_after_batch(trainer: Any, batch_idx: int) -> bool:
    every, batches = trainer.check_val_every_n_epoch, trainer.val_check_batch
    if batches == float("inf") or (every is not None and _is_once_an_epoch(trainer)):
        return False
    if every is not None and (trainer.current_epoch + 1) % every:
        return False
    done = trainer.fit_loop.total_batch_idx if every is None else batch_idx
    return bool((done + 1) % batches == 0)


def _is_once_an_epoch(trainer: Any) -> bool:
    return bool(trainer.val_check_batch >= trainer.num_training_batches)


def _line(record: EvaluationRecord) -> str:
    return line_of(record, f"validation of step {record.step}, epoch {int(record.epoch or 0)}", record.metrics)
