"""`SakuraLightningCallback`: asynchronous validation for Lightning's Trainer.

- Cadence: whenever Lightning would validate (`check_val_every_n_epoch`, `val_check_interval`). Lightning itself does
  not.
- Validation: the module's own `validation_step` and metrics, run by a Trainer on the worker (see `validation`).
- Logs: the trainer's loggers receive a result with the step at which Lightning would have logged it. From then on,
  `callback_metrics` and `logged_metrics` have it.
- Decisions: `EarlyStopping`, `ModelCheckpoint` and plateau schedulers act once for each result (see `monitors`).
- Order: results are reported at the end of the next epoch; with drain="lazy" after any batch.
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
from ...evaluation.evaluator import AsyncEvaluator
from ...evaluation.pace import Drain
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


@with_options(RunOptions)
class SakuraLightningCallback(Callback):  # type: ignore[misc]  # its base is Any to mypy here
    """Callback of Lightning's Trainer that validates asynchronously while training goes on.

    Pass `limit_val_batches=0` to the Trainer, or Lightning validates too. The callback may be used for several fits,
    one after another. With several ranks, every rank has it; rank 0 sends the weights, and all receive the results.

    Args:
        val_loader_factory: makes the validation data on a worker.
        model_factory: makes the module on a worker. None: call the module's class with its saved hyperparameters.
        val_compute: place of the validations. None: a thread of this process; "subprocess"; a pool, one of its nodes
            or roles; an AdaptiveCompute; or any Dispatcher.
        model_path: file for the state dict with the best `monitor`; None: no file.
        val_options: further arguments of the worker's Trainer, such as limit_val_batches.
        monitor: metric that decides about `best_val_loss` and `model_path`.
        mode: "min" or "max".
        verbose: print a line for each result.
        drain: "strict" waits for the previous result when the next validation is due; "lazy" does not.
        max_age_steps: steps that training may be ahead of a result. An older result is "late": it is logged, but does
            not change training. None: no limit.
        trainable_only: send only trained weights and buffers; "auto": if the module contains a PEFT model.
        ranks: ranks of the run; None: those of torch's process group.
        **options: as for `AsyncEvaluator`: cache_key, fp16_state_dict, max_pending, on_backpressure, on_error, gate,
            timeout_s, timeline, async_copy and snapshots.

    Attributes:
        history: a row for each validation: `epoch` (from 0), its metrics, `worker_name`, `elapsed_secs`, `step`,
            `snapshot_id`, `submitted_at`, `started_at`, `finished_at` and `status`. `skipped` is True for a skipped
            one.
        records: the same as `EvaluationRecord` objects.

    Raises:
        UsageError: a value is not legal.

    Example:
        Validate each epoch in a subprocess::

            validation = SakuraLightningCallback(val_loader_factory=make_loader, val_compute="subprocess")
            trainer = lightning.Trainer(max_epochs=3, callbacks=[validation], limit_val_batches=0)
            trainer.fit(module, train_loader)
            print(validation.best_val_loss)
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
            raise UsageError(f"mode={mode!r}: must be 'min' or 'max'; set mode='min' (the default) or 'max'")
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
        self._requests: dict[int, _Request] = {}

    # Lightning's events ----------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        interval = getattr(trainer, "_val_check_time_interval", None)
        if interval is not None:
            raise UsageError(
                f"val_check_interval={interval!r}: a time is not supported with asynchronous "
                "validation; set a number of batches or a fraction"
            )
        self.close()
        self._requests = {}
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
            # Lightning counts this batch only after its callbacks have run.
            logger_step = trainer.fit_loop.epoch_loop._batches_that_stepped
            part = (batch_idx + 1) / trainer.num_training_batches
            self._submit(trainer, _Request(logger_step=logger_step, epochs=trainer.current_epoch + part))
        if is_due or self._is_lazy:
            self._report(trainer, self._evaluations.poll(step=trainer.global_step))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._watching.hold_schedulers()
        if _is_due_after_epoch(trainer):
            logger_step = trainer.fit_loop.epoch_loop._batches_that_stepped - 1
            self._submit(trainer, _Request(logger_step=logger_step, epochs=trainer.current_epoch + 1.0))
        self._report(trainer, self._evaluations.poll(step=trainer.global_step))
        if _is_last_epoch(trainer):  # in on_train_end it would be too late: other callbacks may run before this one
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
        """Number of validations without a reported result."""
        return self._evaluations.pending

    @property
    def best_val_loss(self) -> float | None:
        """Best value of `monitor`; None before the first result."""
        return self._best.value

    def close(self) -> None:
        """Cancel open validations and restore other callbacks' hooks. Idempotent; called at the end of every fit."""
        if self._monitors is not None:
            self._monitors.detach()
            self._monitors = None
        self._evaluations.close()

    # Within ----------------------------------------------------------------------------------------------------------

    @property
    def _watching(self) -> Monitors:
        if self._monitors is None:
            raise UsageError(f"{type(self).__name__}: no fit is running; pass it to lightning.Trainer(callbacks=[...])")
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

    def _submit(self, trainer: Any, request: _Request) -> None:
        step = trainer.global_step
        if step in self._requests:  # accumulated batches do not change the weights
            return
        self._requests[step] = request
        self._watching.save_candidates(step=step)
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
        # A value logged both on_step and on_epoch is in callback_metrics under its own name, too.
        plain = {name: value for name, value in record.metrics.items() if f"{name}_epoch" not in record.metrics}
        metrics = {**plain, "epoch": int(record.epoch or 0)}
        for logger in trainer.loggers:
            logger.log_metrics(metrics=metrics, step=self._requests[record.step].logger_step)
            logger.save()

    def _decide(self, trainer: Any, record: EvaluationRecord) -> None:
        self._best.note(record.metrics)
        metrics = {name: torch.tensor(value) for name, value in record.metrics.items()}
        trainer.callback_metrics.update(metrics)
        trainer.logged_metrics.update(metrics)
        self._watching.pass_result(metrics, step=record.step, epoch=int(record.epoch or 0))
        for callback in trainer.callbacks:
            if isinstance(callback, LightningCallbacks):
                epochs = self._requests[record.step].epochs
                callback.evaluated_beside(record.metrics, step=record.step, epoch=epochs)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Facts of a validation at the time of its request."""

    logger_step: int
    """Step with which Lightning would have logged it."""
    epochs: float
    """Epochs trained so far."""


def _factory_of(module: Any) -> Callable[[], Any]:
    kind: Any = type(module)
    parameters = inspect.signature(kind).parameters
    known = {name: value for name, value in (getattr(module, "hparams", None) or {}).items() if name in parameters}
    try:
        inspect.signature(kind).bind(**known)
    except TypeError as error:
        raise UsageError(
            f"model_factory=None: {kind.__name__} needs arguments that it has not saved ({error}); pass a function "
            "that makes the module, or call self.save_hyperparameters() in its __init__"
        ) from None
    return partial(kind, **known)


def _has_adapters(module: Any) -> bool:
    """Return whether a module contains a PEFT model, of which only trained weights are sent."""
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
