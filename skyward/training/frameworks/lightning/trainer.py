"""`SakuraTrainer`: training with Lightning and asynchronous validation in one call."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ....errors import UsageError
from ...evaluation.legal import check_names
from .package import lightning

if TYPE_CHECKING:
    from ...evaluation import EvaluationRecord
    from .evaluation import SakuraLightningCallback


class SakuraTrainer:
    """Train a LightningModule with Lightning's Trainer, and validate asynchronously.

    `run` may be called several times, one after another.

    Args:
        val_compute: place of the validations. None: a thread of this process; "subprocess"; a pool, one of its nodes
            or roles; an AdaptiveCompute; or any Dispatcher.
        model_factory: makes the module on a worker. None: call the module's class with its saved hyperparameters.
        val_loader_factory: makes the validation data on a worker. None: use the `val_loader` of `run`, which must be
            picklable if the worker is another process.
        model_path: file for the state dict with the best `monitor`; None: no file.
        verbose: print a line for each result.
        **options: arguments of `SakuraLightningCallback`: monitor ("val_loss") and mode ("min" or "max"), which decide
            about `best_val_loss` and `model_path`; drain, "strict" or "lazy"; cache_key, fp16_state_dict, max_pending,
            on_backpressure, async_copy, on_error, gate, timeout_s, max_age_steps, snapshots, timeline, ranks,
            trainable_only and val_options. Anything else goes to `lightning.Trainer`. Its `callbacks` run before ours.

    Attributes:
        model_path: file with the best weights, or None.
        trainer: Lightning's Trainer of the last run; None before the first run.

    Example:
        Train three epochs, and validate each one while the next one trains::

            sakura = SakuraTrainer(max_epochs=3, val_compute="subprocess", model_path="best.pt")
            sakura.run(module, train_loader, val_loader)
            print(sakura.best_val_loss)
    """

    __module__ = "skyward.training.sakura"

    def __init__(
        self,
        *,
        val_compute: Any = None,
        model_factory: Callable[[], Any] | None = None,
        val_loader_factory: Callable[[], Any] | None = None,
        model_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        **options: Any,
    ) -> None:
        self._model_factory, self._loader_factory = model_factory, val_loader_factory
        self.model_path = model_path
        names = _names_of_ours()
        self._ours = {name: value for name, value in options.items() if name in names}
        self._ours |= {"val_compute": val_compute, "verbose": verbose}
        self._lightnings = {name: value for name, value in options.items() if name not in names}
        self.trainer: Any = None
        self._callback: SakuraLightningCallback | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """Rows of the last run's validations, empty before the first run.

        Each has `epoch` (from 0), the metrics, `worker_name`, `elapsed_secs`, `step`, `snapshot_id`, `submitted_at`,
        `started_at`, `finished_at` and `status`. `skipped` is True for a skipped one.
        """
        return [] if self._callback is None else self._callback.history

    @property
    def records(self) -> list[EvaluationRecord]:
        """Validations of the last run as `EvaluationRecord` objects."""
        return [] if self._callback is None else self._callback.records

    @property
    def best_val_loss(self) -> float | None:
        """Best value of `monitor`; None before the first result."""
        return None if self._callback is None else self._callback.best_val_loss

    def run(
        self,
        model: Any,
        train_loader: Any,
        val_loader: Any = None,
        *,
        model_factory: Callable[[], Any] | None = None,
        val_loader_factory: Callable[[], Any] | None = None,
        model_path: str | os.PathLike[str] | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        **extra: Any,
    ) -> Any:
        """Train a module to the end. Arguments take precedence over those of the constructor.

        Args:
            model: the LightningModule.
            train_loader: the training data, as `lightning.Trainer.fit` takes it.
            val_loader: the validation data; used if there is no `val_loader_factory`.
            model_factory: as for the constructor.
            val_loader_factory: as for the constructor.
            model_path: as for the constructor.
            ckpt_path: checkpoint of Lightning's to resume.
            **extra: further arguments of Lightning's Trainer.

        Returns:
            `model`, trained.

        Raises:
            UsageError: there is no validation data, or an argument is unknown.
        """
        load_loaders = val_loader_factory or self._loader_factory
        if load_loaders is None:
            if val_loader is None:
                raise UsageError("val_loader=None: no validation data; pass val_loader or val_loader_factory")
            load_loaders = partial(_same_loader, val_loader)
        self.model_path = model_path or self.model_path
        from .evaluation import SakuraLightningCallback

        package = lightning()
        options = {**self._lightnings, **extra}
        for_both = {name: options[name] for name in ("inference_mode",) if name in options}
        for_validation = {name: options.pop(name) for name in ("limit_val_batches",) if name in options}
        ours = {**self._ours, "val_options": {**for_both, **for_validation, **(self._ours.get("val_options") or {})}}
        self._callback = callback = SakuraLightningCallback(
            val_loader_factory=load_loaders,
            model_factory=model_factory or self._model_factory,
            model_path=self.model_path,
            **ours,
        )
        theirs = set(inspect.signature(package.Trainer.__init__).parameters)
        check_names(type(self).__name__, options, theirs | _names_of_ours())
        others = options.pop("callbacks", None) or []
        callbacks = [*(others if isinstance(others, list | tuple) else [others]), callback]
        # Lightning warns of a module with a validation_step but no validation data. An empty list prevents that.
        has_step = type(model).validation_step is not package.LightningModule.validation_step
        self.trainer = package.Trainer(**options, callbacks=callbacks, limit_val_batches=0)
        self.trainer.fit(model, train_loader, [] if has_step else None, ckpt_path=ckpt_path)
        return model


def _names_of_ours() -> set[str]:
    from .evaluation import SakuraLightningCallback  # imports Lightning

    return set(inspect.signature(SakuraLightningCallback).parameters)


def _same_loader(loader: Any) -> Any:
    """Return a loader; with `partial`, a picklable factory of it."""
    return loader
