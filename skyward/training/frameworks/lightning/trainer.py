"""`SakuraTrainer`: a fit of Lightning's whose validations run beside it, in one call."""

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

__all__ = ["SakuraTrainer"]


class SakuraTrainer:
    """Trains a LightningModule with Lightning's Trainer, and validates beside it.

    All arguments are keywords; those that are not named here go to `lightning.Trainer`. The user's `callbacks` come
    before ours. `run` may be called several times, one after another.

    val_compute: where validations run. None: a thread here; "subprocess"; a pool, a node or role of it; an
        AdaptiveCompute; any Dispatcher.
    model_factory: makes the module that is trained, on a worker; None: its class, with the hyperparameters that it has
        saved.
    val_loader_factory: makes the validation data, on a worker; None: what `run` is given as `val_loader`, which must
        be picklable where the worker is another process.
    model_path: the weights with the best `monitor` that was scored, as a state dict.
    monitor, mode: the metric that `best_val_loss` and `model_path` are about; "min" or "max".
    verbose: a line on standard output for each result.
    drain: "strict" waits for the result before, when the next validation is due; "lazy" does not.
    cache_key, fp16_state_dict, max_pending, on_backpressure, async_copy, on_error, gate, timeout_s, max_age_steps,
        snapshots, timeline, ranks: as `SakuraHFCallback` has them.

    `history`: a row for each validation: `epoch` (from 0), its metrics, `worker_name`, `elapsed_secs`, `step`,
    `snapshot_id`, `submitted_at`, `started_at`, `finished_at`, `status`; `skipped` True where it was.
    `best_val_loss`: None until the first result. `model_path`. `trainer`: Lightning's, of the last run.
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
        return [] if self._callback is None else self._callback.history

    @property
    def records(self) -> list[EvaluationRecord]:
        return [] if self._callback is None else self._callback.records

    @property
    def best_val_loss(self) -> float | None:
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
        """Trains `model`, and gives it back. What is given here wins over what the constructor was given.

        ckpt_path: a checkpoint of Lightning's to go on from. extra: further arguments of Lightning's Trainer.
        Raises: UsageError (a ValueError) without validation data; what Lightning raises.
        """
        load_loaders = val_loader_factory or self._loader_factory
        if load_loaders is None:
            if val_loader is None:
                raise UsageError("val_loader: there is nothing to validate with; give it, or val_loader_factory")
            load_loaders = partial(_given, val_loader)
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
        given = options.pop("callbacks", None) or []
        callbacks = [*(given if isinstance(given, list | tuple) else [given]), callback]
        # Lightning takes a module with a validation_step and nothing to validate for an oversight.
        has_step = type(model).validation_step is not package.LightningModule.validation_step
        self.trainer = package.Trainer(**options, callbacks=callbacks, limit_val_batches=0)
        self.trainer.fit(model, train_loader, [] if has_step else None, ckpt_path=ckpt_path)
        return model


def _names_of_ours() -> set[str]:
    from .evaluation import SakuraLightningCallback  # imports Lightning

    return set(inspect.signature(SakuraLightningCallback).parameters)


def _given(loader: Any) -> Any:
    """Return a loader: with `partial`, a factory of it that can be pickled."""
    return loader
