"""Lightning's callbacks that monitor a metric of asynchronous evaluations, which comes steps later or not at all.

`EarlyStopping`, `ModelCheckpoint` and plateau schedulers read `trainer.callback_metrics` at the end of an epoch. With
asynchronous evaluation they would find nothing there, or count an old value again. While a fit runs, those that monitor
a metric of evaluations act once for each result instead.

A ModelCheckpoint must save the weights that were scored. Its checkpoint is therefore written when the evaluation is
requested, under a name that begins with a dot. The result decides whether it takes its place among the best, or is
deleted.

A metric counts as one of evaluations (`is_ours`) if one has returned it, or if training has not logged it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ..foreign import put
from .package import lightning

_STOPPERS_HOOKS = ("on_train_epoch_end", "on_validation_end")
_SAVERS_HOOKS = ("on_train_batch_end", "on_train_epoch_end", "on_validation_end")


class Monitors:
    """Monitoring callbacks and schedulers of one fit, whose hooks are replaced between `attach` and `detach`."""

    def __init__(self, trainer: Any) -> None:
        callbacks = lightning("callbacks")
        self._trainer = trainer
        self._stoppers = [callback for callback in trainer.callbacks if isinstance(callback, callbacks.EarlyStopping)]
        savers = [callback for callback in trainer.callbacks if isinstance(callback, callbacks.ModelCheckpoint)]
        self._savers = [saver for saver in savers if saver.monitor is not None]
        self._names: set[str] = set()
        self._waiting: dict[int, list[tuple[Any, str]]] = {}
        self._frequencies: list[tuple[Any, int]] = []
        self._undo = ExitStack()
        self._hooks: dict[tuple[int, str], Callable[..., Any]] = {}

    def attach(self) -> None:
        """Replace the hooks of monitoring callbacks until `detach`."""
        for owners, hooks in ((self._stoppers, _STOPPERS_HOOKS), (self._savers, _SAVERS_HOOKS)):
            for owner in owners:
                for hook in hooks:
                    self._guard(owner, hook)

    def detach(self) -> None:
        """Restore all hooks, and delete checkpoints without a result. It does not wait for other ranks."""
        self._undo.close()
        for step in list(self._waiting):
            self.forget(step)
        for config, frequency in self._frequencies:
            config.frequency = frequency
        self._frequencies = []

    def forget(self, step: int) -> None:
        """Delete the checkpoints of a step that will have no result."""
        for _, path in self._waiting.pop(step, []):
            self._remove(path)

    def hold_schedulers(self) -> None:
        """Suspend plateau schedulers that monitor our metrics, or Lightning would raise where one is still missing."""
        held = {id(config) for config, _ in self._frequencies}
        for config in self._trainer.lr_scheduler_configs:
            if config.reduce_on_plateau and id(config) not in held and self.is_ours(config.monitor):
                self._frequencies.append((config, config.frequency))
                config.frequency = sys.maxsize
        for config, frequency in self._frequencies:
            if not self.is_ours(config.monitor):
                config.frequency = frequency
        self._frequencies = [frequency for frequency in self._frequencies if self.is_ours(frequency[0].monitor)]

    def is_ours(self, name: str) -> bool:
        """Return whether a metric comes from evaluations."""
        return name in self._names or name not in self._trainer.callback_metrics

    def save_candidates(self, *, step: int) -> None:
        """Write checkpoints of the step whose evaluation has been requested. Collective, as saving is."""
        epoch = self._trainer.current_epoch + 1
        for saver in self._savers:
            every = saver.every_n_epochs
            if not self.is_ours(saver.monitor) or saver.save_top_k == 0 or (every and epoch % every):
                continue
            path = os.path.join(saver.dirpath or "", f".evaluated-{step}{saver.FILE_EXTENSION}")
            self._trainer.save_checkpoint(path, saver.save_weights_only)
            self._waiting.setdefault(step, []).append((saver, path))

    def pass_result(self, metrics: dict[str, Any], *, step: int, epoch: int) -> None:
        """Pass the result of a step to everything that monitors it; `callback_metrics` already has it."""
        self._names |= set(metrics)
        trainer = self._trainer
        for stopper in self._stoppers:
            if self.is_ours(stopper.monitor) and not trainer.should_stop:
                for hook in _STOPPERS_HOOKS:  # it acts on one of them
                    self._hooks[id(stopper), hook](trainer, trainer.lightning_module)
        for saver, path in self._waiting.pop(step, []):
            self._place(saver, path, metrics, step=step, epoch=epoch)
        for config, frequency in self._frequencies:
            if config.monitor in metrics and (config.interval == "step" or (epoch + 1) % frequency == 0):
                trainer.lightning_module.lr_scheduler_step(config.scheduler, metrics[config.monitor])

    # -----------------------------------------------------------------------------------------------------------------

    def _guard(self, owner: Any, hook: str) -> None:
        def guarded(trainer: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_ours(owner.monitor):
                return original(trainer, module, *args, **kwargs)
            if hook == "on_train_epoch_end" and getattr(owner, "save_last", None):
                owner._save_last_checkpoint(trainer, owner._monitor_candidates(trainer))
            return None

        original = self._hooks[id(owner), hook] = put(self._undo, owner, hook, guarded)

    def _place(self, saver: Any, path: str, metrics: dict[str, Any], *, step: int, epoch: int) -> None:
        """Move the checkpoint of a step to where `saver` puts one with this score, or delete it."""
        import torch

        trainer, is_placed = self._trainer, False

        def save_checkpoint(filepath: Any, *_: Any, **__: Any) -> None:
            nonlocal is_placed
            is_placed = True
            if trainer.is_global_zero:
                _files(path).mv(path, os.fspath(filepath), recursive=True)
            trainer.strategy.barrier()

        candidates = {**trainer.callback_metrics, **metrics}
        candidates |= {"epoch": torch.tensor(epoch), "step": torch.tensor(step)}
        try:
            with ExitStack() as undo:
                put(undo, trainer, "save_checkpoint", save_checkpoint)
                saver._save_topk_checkpoint(trainer, candidates)
        finally:
            if not is_placed:
                self._remove(path)

    def _remove(self, path: str) -> None:
        if self._trainer.is_global_zero and _files(path).exists(path):
            _files(path).rm(path, recursive=True)


def _files(path: str) -> Any:
    from importlib import import_module

    return import_module("fsspec.core").url_to_fs(path)[0]
