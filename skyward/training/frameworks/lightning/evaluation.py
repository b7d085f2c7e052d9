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
from typing import TYPE_CHECKING, Any, Literal

from ....errors import UsageError
from ...agree import Ranks
from ...callbacks.lines import write_line
from ..evaluations import Beside, EvaluatorOptions, line_of, row_of_epoch
from ..model import class_at_first_use
from .callbacks import LightningTranslation, lightning_callback, lightning_package
from .monitors import Monitors
from .validation import Validation, validate

if TYPE_CHECKING:
    from ...evaluation import AsyncEvaluator, EvaluationRecord, Timeline
    from ...snapshot import SnapshotPool

__all__ = ["SakuraLightning", "SakuraLightningCallback"]


class SakuraLightning(Beside):
    """What `SakuraLightningCallback` is but for Lightning's base class, so that nothing is imported here."""

    def __init__(  # noqa: PLR0913  # keyword-only options
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
        drain: Literal["lazy", "strict"] = "strict",
        cache_key: str | None = "auto",
        fp16_state_dict: bool = False,
        max_pending: int = 4,
        on_backpressure: Literal["skip", "queue", "block"] = "skip",
        async_copy: bool = True,
        on_error: Literal["record", "raise"] = "record",
        gate: Literal["auto", "always", "sync"] = "auto",
        timeout_s: float | None = None,
        max_age_steps: int | None = None,
        trainable_only: bool | Literal["auto"] = "auto",
        snapshots: SnapshotPool | None = None,
        timeline: Timeline | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if mode not in ("min", "max"):
            raise UsageError(f"mode: {mode!r}; it is 'min' or 'max'")
        options = EvaluatorOptions(
            val_compute=val_compute,
            drain=drain,
            cache_key=cache_key,
            fp16_state_dict=fp16_state_dict,
            max_pending=max_pending,
            on_backpressure=on_backpressure,
            async_copy=async_copy,
            on_error=on_error,
            gate=gate,
            timeout_s=timeout_s,
            snapshots=snapshots,
            timeline=timeline,
        )
        super().__init__(options, max_age_steps=max_age_steps, ranks=ranks)
        self._loader_factory, self._model_factory, self._model_path = val_loader_factory, model_factory, model_path
        self._monitor, self._mode, self._verbose, self._trainable_only = monitor, mode, verbose, trainable_only
        self._val_options = dict(val_options or {})
        self._monitors: Monitors | None = None
        self._asked: dict[int, _Asked] = {}
        self.best_val_loss: float | None = None

    # Lightning's events ----------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            raise UsageError("val_check_interval: a time is not possible here; give a number of batches, or a fraction")
        self.close()
        self._asked = {}
        trainable_only = _has_adapters(pl_module) if self._trainable_only == "auto" else self._trainable_only
        self._open(lambda: self._evaluator(trainer, pl_module), self._ranks_of_run(), trainable_only=trainable_only)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._monitors = Monitors(trainer, package=lightning_package())
        self._monitors.attach()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._watching.hold_schedulers()
        is_due = _is_due_after_batch(trainer, batch_idx)
        if is_due:
            # Lightning counts this batch when its callbacks have had it.
            logger_step = trainer.fit_loop.epoch_loop._batches_that_stepped
            part = (batch_idx + 1) / trainer.num_training_batches
            self._submit(trainer, _Asked(logger_step=logger_step, epochs=trainer.current_epoch + part))
        if is_due or self._options.drain == "lazy":
            self._report(trainer, self._met.poll(step=trainer.global_step))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._watching.hold_schedulers()
        if _is_due_after_epoch(trainer):
            logger_step = trainer.fit_loop.epoch_loop._batches_that_stepped - 1
            self._submit(trainer, _Asked(logger_step=logger_step, epochs=trainer.current_epoch + 1.0))
        self._report(trainer, self._met.poll(step=trainer.global_step))
        if _is_last_epoch(trainer):  # other callbacks are told before us that training has ended
            self._report(trainer, self._met.drain(step=trainer.global_step))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._report(trainer, self._met.drain(step=trainer.global_step))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.close()

    # A user's --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends what this object has started, and gives hooks back. Called when a fit ends, however it ends."""
        if self._monitors is not None:
            self._monitors.detach()
            self._monitors = None
        super().close()

    # Within ----------------------------------------------------------------------------------------------------------

    @property
    def _watching(self) -> Monitors:
        if self._monitors is None:
            raise UsageError(f"{type(self).__name__}: {self._is_missing}")
        return self._monitors

    def _evaluator(self, trainer: Any, module: Any) -> AsyncEvaluator:
        from ...evaluation import BestModel

        best = None
        if self._model_path is not None:
            best = BestModel(self._model_path, self._monitor, greater_is_better=self._mode == "max")
        options: dict[str, Any] = {"precision": trainer.precision}
        if self._options.val_compute is None and trainer.strategy.root_device.type == "cpu":
            options["accelerator"] = "cpu"
        options |= self._val_options
        return self._options.evaluator(
            self._model_factory or _factory_of(module),
            validate,
            Validation(loaders=self._loader_factory, options=options, package=lightning_package()),
            best=best,
            argument_names={"payload": "val_loader_factory"},
        )

    def _submit(self, trainer: Any, asked: _Asked) -> None:
        step = trainer.global_step
        if step in self._asked:  # batches that are accumulated do not change the weights
            return
        self._asked[step] = asked
        self._watching.asked(step=step)
        self._met.submit(trainer.strategy.model, step=step, epoch=float(trainer.current_epoch))

    def _report(self, trainer: Any, records: list[EvaluationRecord]) -> None:
        for record in records:
            self.records.append(record)
            self.history.append(row_of_epoch(record))
            if self._verbose and trainer.is_global_zero:
                write_line(_line(record))
            if record.status in ("ok", "late"):
                self._log(trainer, record)
            if record.status == "ok":
                self._decide(trainer, record)
            else:
                self._watching.forget(record.step)

    def _log(self, trainer: Any, record: EvaluationRecord) -> None:
        # What is logged on_step and on_epoch is in callback_metrics under its own name, too.
        told = {name: value for name, value in record.metrics.items() if f"{name}_epoch" not in record.metrics}
        metrics = {**told, "epoch": int(record.epoch or 0)}
        for logger in trainer.loggers:
            logger.log_metrics(metrics=metrics, step=self._asked[record.step].logger_step)
            logger.save()

    def _decide(self, trainer: Any, record: EvaluationRecord) -> None:
        import torch

        score = record.metrics.get(self._monitor)
        is_better = score is not None and (
            self.best_val_loss is None
            or (score < self.best_val_loss if self._mode == "min" else score > self.best_val_loss)
        )
        if is_better:
            self.best_val_loss = score
        metrics = {name: torch.tensor(value) for name, value in record.metrics.items()}
        trainer.callback_metrics.update(metrics)
        trainer.logged_metrics.update(metrics)
        self._watching.told(metrics, step=record.step, epoch=int(record.epoch or 0))
        for each in trainer.callbacks:
            if isinstance(each, LightningTranslation):  # ours, in Lightning's Trainer
                epochs = self._asked[record.step].epochs
                each.evaluated_beside(record.metrics, step=record.step, epoch=epochs)


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
    return any(hasattr(each, "peft_config") for each in module.modules())


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


SAKURALIGHTNINGCALLBACK_DOC = """What `SakuraTrainer` does, as a callback of a Trainer of your own.

    Give that Trainer `limit_val_batches=0`, or it validates, too. Arguments and results are `SakuraTrainer`'s;
    val_loader_factory is required, and val_options are arguments of the worker's Trainer (limit_val_batches, ...).
    """

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as _Callback

    class SakuraLightningCallback(SakuraLightning, _Callback):  # type: ignore[misc]  # its base is Any to mypy here
        __doc__ = SAKURALIGHTNINGCALLBACK_DOC

else:
    __getattr__ = class_at_first_use(
        __name__,
        "SakuraLightningCallback",
        SAKURALIGHTNINGCALLBACK_DOC,
        lambda: (SakuraLightning, lightning_callback()),
    )
