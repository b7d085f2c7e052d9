"""Checks that a value is a number within bounds; the caller names the field and its unit."""

from __future__ import annotations

from math import inf
from typing import TypeGuard


def is_positive(value: object, *, or_zero: bool = False) -> TypeGuard[float]:
    """Return whether a value is a finite number > 0 (with `or_zero`: >= 0) and not a bool."""
    if isinstance(value, bool) or not (isinstance(value, int | float) or _is_real(value)):
        return False
    return 0 < float(value) < inf or (or_zero and value == 0)


def _is_real(value: object) -> TypeGuard[float]:
    from numbers import Real  # only for numpy's scalars and the like, as it takes memory

    return isinstance(value, Real)
