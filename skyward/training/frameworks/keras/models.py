"""Keras's models and their weights: scoring on workers, taking, loading and saving."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import UsageError

__all__ = [
    "UNBUILT",
    "KerasFactory",
    "KerasSave",
    "KerasScore",
    "Weights",
    "load_keras",
    "load_weights_anywhere",
    "values_of",
]

Weights = Sequence[Any]

UNBUILT = (
    "model_factory: the model that it makes has no weights yet; begin it with keras.Input(shape), or call "
    "model.build(shape) in the factory"
)


@dataclass(frozen=True)
class KerasFactory:
    """A user's `model_factory`, whose models have their weights."""

    factory: Callable[[], Any]
    """The user's."""
    input_shape: Any
    """Of the model that trains, (batch, ...); None, a list or a dict where it has no single one."""

    def __call__(self) -> Any:
        """Raises: UsageError where the model has no weights yet, and cannot be built; what the factory raises."""
        model = self.factory()
        if not model.weights and not getattr(model, "built", True):
            if not isinstance(self.input_shape, tuple):
                raise UsageError(UNBUILT)
            model.build((None, *self.input_shape[1:]))
        return model


@dataclass(frozen=True)
class KerasScore:
    """A user's `val_fn`, as workers call it: with a word about the commonest mistake."""

    val_fn: Callable[[Any, Any], Any]

    def __call__(self, model: Any, payload: Any) -> Any:
        """Raises: UsageError where the model would have to be compiled; what `val_fn` raises."""
        try:
            return self.val_fn(model, payload)
        except Exception as error:
            # Keras says so by itself in some of its backends; others miss an attribute that compile() sets.
            if getattr(model, "compiled", True) or not (isinstance(error, AttributeError) or "compil" in str(error)):
                raise
            raise UsageError(
                "model_factory: the model that it makes is not compiled, which what val_fn calls needs (evaluate, "
                f"test_on_batch): call model.compile(loss=..., metrics=...) in the factory ({error})"
            ) from error


class KerasSave:
    """Writes weights as Keras reads them. model: of the same architecture, and used for nothing else."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, weights: Any, path: Path) -> None:
        """By the end of its name: a whole model (.keras), weights (.h5), or arrays by number (.npz)."""
        load_keras(self._model, weights)
        if path.suffix == ".npz":
            import numpy as np

            np.savez(path, **{str(at): get_weight for at, get_weight in enumerate(self._model.get_weights())})
        elif path.suffix == ".keras":
            self._model.save(path)
        else:
            written = path.with_name(f"{path.name}.weights.h5")  # the only end that Keras takes
            self._model.save_weights(written)
            os.replace(written, path)


def load_keras(model: Any, weights: Any) -> None:
    """Puts weights into the model of a factory. Raises: UsageError where it is another architecture."""
    own = [tuple(weight.shape) for weight in model.weights]
    shapes = [tuple(weight.shape) for weight in weights]
    if own == shapes:
        load_weights_anywhere(model, weights)
        return
    if not own:
        raise UsageError(UNBUILT)
    at = next((at for at, (one, other) in enumerate(zip(own, shapes, strict=False)) if one != other), None)
    differs = f"{len(own)} weights, not {len(shapes)}" if at is None else f"{own[at]} for weight {at}, not {shapes[at]}"
    raise UsageError(f"model_factory: the model that it makes is not the one that trains: it has {differs}")


def values_of(model: Any) -> list[Any]:
    """A model's weights as its backend holds them, without a copy: to be copied once, by who takes a snapshot."""
    return [variable.value.detach() if _is_torch(variable.value) else variable.value for variable in model.weights]


def load_weights_anywhere(model: Any, weights: Weights) -> None:
    """Puts weights, arrays or torch's tensors, into a Keras model of any backend."""
    model.set_weights([_array(weight) for weight in weights])


def _array(value: Any) -> Any:
    if not _is_torch(value):
        return value
    value = value.detach().cpu()
    return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"
