"""Keras's models and weights: scoring on workers, copying, loading and saving."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import UsageError

Weights = Sequence[Any]

UNBUILT = (
    "model_factory: its model has no weights yet; begin the model with keras.Input(shape), or call model.build(shape) "
    "in the factory"
)


@dataclass(frozen=True)
class KerasFactory:
    """Adapter of a `model_factory` that builds the model, so that it has weights."""

    factory: Callable[[], Any]
    """The user's factory."""
    input_shape: Any
    """Input shape of the trained model, (batch, ...); None, a list or a dict if it has no single one."""

    def __call__(self) -> Any:
        """Make a model.

        Raises:
            UsageError: the model has no weights and cannot be built.
        """
        model = self.factory()
        if not model.weights and not getattr(model, "built", True):
            if not isinstance(self.input_shape, tuple):
                raise UsageError(UNBUILT)
            model.build((None, *self.input_shape[1:]))
        return model


@dataclass(frozen=True)
class KerasScore:
    """Adapter of a `val_fn` for workers, which explains the most common mistake."""

    val_fn: Callable[[Any, Any], Any]

    def __call__(self, model: Any, payload: Any) -> Any:
        """Score a model.

        Raises:
            UsageError: `val_fn` needs a compiled model.
        """
        try:
            return self.val_fn(model, payload)
        except Exception as error:
            # Some backends of Keras report it clearly; others miss an attribute that compile() sets.
            if getattr(model, "compiled", True) or not (isinstance(error, AttributeError) or "compil" in str(error)):
                raise
            raise UsageError(
                f"model_factory: its model is not compiled, but val_fn needs a compiled one ({error}); call "
                "model.compile(loss=..., metrics=...) in the factory"
            ) from error


class KerasSave:
    """Writer of weights in Keras's formats; `model` has the same architecture and is used for nothing else."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, weights: Any, path: Path) -> None:
        """Write a whole model (.keras), weights (.h5), or arrays by number (.npz), by the extension of `path`."""
        load_keras(self._model, weights)
        if path.suffix == ".npz":
            import numpy as np

            np.savez(path, **{str(at): get_weight for at, get_weight in enumerate(self._model.get_weights())})
        elif path.suffix == ".keras":
            self._model.save(path)
        else:
            written = path.with_name(f"{path.name}.weights.h5")  # Keras accepts only this extension
            self._model.save_weights(written)
            os.replace(written, path)


def load_keras(model: Any, weights: Any) -> None:
    """Load weights into the model of a factory.

    Raises:
        UsageError: it has another architecture.
    """
    own = [tuple(weight.shape) for weight in model.weights]
    shapes = [tuple(weight.shape) for weight in weights]
    if own == shapes:
        load_weights_anywhere(model, weights)
        return
    if not own:
        raise UsageError(UNBUILT)
    at = next((at for at, (one, other) in enumerate(zip(own, shapes, strict=False)) if one != other), None)
    differs = f"{len(own)} weights, not {len(shapes)}" if at is None else f"{own[at]} for weight {at}, not {shapes[at]}"
    raise UsageError(
        f"model_factory: its model differs from the trained one (it has {differs}); make the same architecture"
    )


def values_of(model: Any) -> list[Any]:
    """Return a model's weights as its backend holds them, without a copy; the caller's snapshot copies them."""
    return [variable.value.detach() if _is_torch(variable.value) else variable.value for variable in model.weights]


def load_weights_anywhere(model: Any, weights: Weights) -> None:
    """Load weights, as arrays or torch tensors, into a Keras model of any backend."""
    model.set_weights([_array(weight) for weight in weights])


def _array(value: Any) -> Any:
    if not _is_torch(value):
        return value
    value = value.detach().cpu()
    return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()


def _is_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"
