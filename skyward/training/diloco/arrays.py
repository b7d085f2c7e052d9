"""Arithmetic on arrays of either kind: torch tensors, or numpy arrays.

Neither library is imported: methods of an array tell which one it belongs to. A tensor must not require a gradient.
"""

from __future__ import annotations

from typing import Any

Array = Any
"""torch.Tensor or numpy.ndarray, of any shape, float32 unless a function says otherwise."""


def _is_tensor(array: Array) -> bool:
    return hasattr(array, "add_")


def copy_of(array: Array) -> Array:
    """Return a copy with memory of its own."""
    return array.clone() if _is_tensor(array) else array.copy()


def empty_like(array: Array) -> Array:
    """Return an array of the same shape and dtype, in C order, whose values are not set."""
    if _is_tensor(array):
        return array.new_empty(array.shape)
    return type(array)(array.shape, array.dtype)


def add_scaled(target: Array, source: Array, factor: float) -> None:
    """Add `factor * source` to `target` in place, computed in the dtype of `target`.

    For tensors this is the call that torch's optimizers make. On most CPUs it rounds once for each element, so
    `target += factor * source` would give other bits.
    """
    if _is_tensor(target):
        target.add_(source, alpha=factor)
    else:
        target += factor * source.astype(target.dtype, copy=False)
