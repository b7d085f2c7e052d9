"""Puts a snapshot's weights into a model that a worker keeps. Functions that travel to workers by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import UsageError
from .state import FROZEN_SAMPLE, frozen_sample

__all__ = ["load_torch", "load_trainable", "load_weights", "loader_for"]


def load_torch(model: Any, state: Mapping[str, Any]) -> None:
    """A state dict into a torch module, which is in evaluation mode then.

    Floating point values get the dtype of the model's own tensor of that name; integers and bools stay what they are.
    Raises: UsageError, when names are missing or unexpected; torch's RuntimeError, when a shape differs.
    """
    _load(model, state, is_partial=False)


def load_trainable(model: Any, state: Mapping[str, Any]) -> None:
    """As `load_torch`, for a state of trainable parts: what it does not name keeps what the factory gave it."""
    _load(model, state, is_partial=True)


def load_weights(model: Any, weights: Sequence[Any]) -> None:
    """A list of arrays into a Keras model, as its `get_weights` gives it."""
    model.set_weights(list(weights))


def loader_for(state: Any) -> Callable[[Any, Any], object]:
    """The one for a state: a mapping is a torch state dict, whole or of trainable parts; a list is Keras's weights."""
    if isinstance(state, Mapping):
        return load_trainable if FROZEN_SAMPLE in state else load_torch
    return load_weights


def _load(model: Any, state: Mapping[str, Any], *, is_partial: bool) -> None:
    own = model.state_dict(keep_vars=True)
    unexpected = [name for name in state if name not in own and name != FROZEN_SAMPLE]
    missing = [] if is_partial else [name for name in own if name not in state]
    if unexpected or missing:
        parts = [
            f"{what}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
            for what, names in (("it does not have", unexpected), ("not in the state", missing))
            if names
        ]
        raise UsageError(
            f"model_factory: the model that it makes is not the one that trains ({'; '.join(parts)}); it must make "
            "the same architecture"
        )
    if FROZEN_SAMPLE in state:
        _check_frozen(model, state[FROZEN_SAMPLE])
    weights = {name: _as(own[name], value) for name, value in state.items() if name != FROZEN_SAMPLE}
    model.load_state_dict(weights, strict=False)
    model.eval()


def _check_frozen(model: Any, theirs: Any) -> None:
    """Loosely: the worker's may have another dtype."""
    ours = frozen_sample(model).cpu()
    if ours.shape == theirs.shape and bool(((ours - theirs.cpu()).abs() <= 0.02 * ours.abs() + 1e-3).all()):
        return
    raise UsageError(
        "model_factory: only what is trained is sent, and the rest of the model that it makes has other values than "
        "here; load the base's weights in it, or send everything (trainable_only=False)"
    )


def _as(own: Any, value: Any) -> Any:
    is_cast = getattr(value, "is_floating_point", None) and value.is_floating_point() and own.is_floating_point()
    return value.to(own.dtype) if is_cast and value.dtype is not own.dtype else value
