"""Keras's callbacks that wait for a metric, when it comes from beside training: epochs later, if at all.

`EarlyStopping`, `ReduceLROnPlateau` and a `ModelCheckpoint(save_best_only=True)` look at an epoch's logs when it ends:
there they would find nothing, and warn. While `fit` runs, those whose metric training does not give act once for each
result instead, with the logs of the epoch that was evaluated. The model has the weights that were scored while one
that keeps weights acts, so what it writes or restores is what the score is of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from ..foreign import put
from .models import Weights, load_weights_anywhere

__all__ = ["KerasMonitors"]


@dataclass(frozen=True, kw_only=True)
class _Held:
    """A callback whose epoch ends are ours."""

    callback: Any
    hook: Callable[..., Any]
    needs_weights: bool


class KerasMonitors:
    """Those of one fit. Between `attach` and `detach` their `on_epoch_end` is ours. callbacks: all of the fit's."""

    def __init__(self, callbacks: Iterable[Any], model: Any) -> None:
        self._model = model
        self._callbacks = list(callbacks)
        self._held: list[_Held] = []
        self._undo = ExitStack()
        self._waits_for: dict[str, str] = {}

    @property
    def needs_weights(self) -> bool:
        """Whether `told` needs the weights that were scored."""
        return any(held.needs_weights for held in self._held)

    @property
    def waits_for(self) -> dict[str, str]:
        """Metrics that an epoch's logs did not have, each with who monitors it."""
        return dict(self._waits_for)

    def attach(self) -> None:
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
        """Gives everything back. Idempotent."""
        self._undo.close()
        self._held = []

    def told(self, epoch: int, logs: Mapping[str, Any], weights: Weights | None) -> None:
        """What came of an epoch's evaluation. logs: that epoch's, with the metrics, named `val_...`.

        weights: those that were scored; needed where `needs_weights`.
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
