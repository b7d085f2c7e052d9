"""Checks that a value is a number within bounds; the caller names the field and its unit."""

from __future__ import annotations

from math import inf
from numbers import Real
from typing import TypeGuard


def is_positive(value: object, *, or_zero: bool = False) -> TypeGuard[float]:
    """Return whether a value is a finite number > 0 (with `or_zero`: >= 0) and not a bool."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    return 0 < float(value) < inf or (or_zero and value == 0)
