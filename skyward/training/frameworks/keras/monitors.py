"""Keras's callbacks that monitor a metric of asynchronous evaluations, which comes epochs later or not at all.

`EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint(save_best_only=True)` read an epoch's logs at its end. With
asynchronous evaluation they would find nothing there, and warn. While `fit` runs, a callback whose metric is not in the
logs acts once for each result instead, with the logs of the evaluated epoch. If it keeps weights, the model has the
scored weights meanwhile, so that it writes or restores those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from ..foreign import put
from .models import Weights, load_weights_anywhere


@dataclass(frozen=True, kw_only=True)
class _Held:
    """Callback whose `on_epoch_end` is replaced."""

    callback: Any
    hook: Callable[..., Any]
    needs_weights: bool


class KerasMonitors:
    """Monitoring callbacks of one fit, whose `on_epoch_end` is replaced between `attach` and `detach`.

    Args:
        callbacks: all callbacks of the fit.
        model: the model that is trained.
    """

    def __init__(self, callbacks: Iterable[Any], model: Any) -> None:
        self._model = model
        self._callbacks = list(callbacks)
        self._held: list[_Held] = []
        self._undo = ExitStack()
        self._waits_for: dict[str, str] = {}

    @property
    def needs_weights(self) -> bool:
        """Return whether `pass_result` needs the scored weights."""
        return any(held.needs_weights for held in self._held)

    @property
    def waits_for(self) -> dict[str, str]:
        """Metrics missing in an epoch's logs, each with the class that monitors it."""
        return dict(self._waits_for)

    def attach(self) -> None:
        """Replace `on_epoch_end` of monitoring callbacks until `detach`."""
        from keras import callbacks as kinds

        for callback in self._callbacks:
            if isinstance(callback, kinds.ModelCheckpoint):
                is_monitor = callback.save_best_only and callback.save_freq == "epoch"
                needs_weights = True
            else:
                is_monitor = isinstance(callback, (kinds.EarlyStopping, kinds.ReduceLROnPlateau))
                needs_weights = bool(getattr(callback, "restore_best_weights", False))
            if is_monitor:
                self._hold(callback, needs_weights)

    def detach(self) -> None:
        """Restore all callbacks. Idempotent."""
        self._undo.close()
        self._held = []

    def pass_result(self, epoch: int, logs: Mapping[str, Any], weights: Weights | None) -> None:
        """Pass the result of an epoch's evaluation to the callbacks that monitor it.

        Args:
            epoch: the evaluated epoch, from 0.
            logs: that epoch's logs with the metrics, named `val_...`.
            weights: the scored weights; required if `needs_weights`.
        """
        for held in self._held:
            if held.callback.monitor not in logs or not _is_number(logs[held.callback.monitor]):
                continue
            with _with_weights(self._model, weights if held.needs_weights else None):
                held.hook(epoch, dict(logs))

    def _hold(self, callback: Any, needs_weights: bool) -> None:
        def on_epoch_end(epoch: int, logs: Any = None) -> None:
            if callback.monitor in (logs or {}):
                original(epoch, logs)
            else:
                self._waits_for.setdefault(callback.monitor, type(callback).__name__)

        original = put(self._undo, callback, "on_epoch_end", on_epoch_end)
        self._held.append(_Held(callback=callback, hook=original, needs_weights=needs_weights))


@contextmanager
def _with_weights(model: Any, weights: Weights | None) -> Iterator[None]:
    if weights is None:
        yield
        return
    kept = model.get_weights()
    load_weights_anywhere(model, weights)
    try:
        yield
    finally:
        model.set_weights(kept)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
