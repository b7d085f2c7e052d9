"""Centred smoothing of a metric, which does not lag behind the values as a moving average of the past does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from .records import Points

SHARE = 0.04
"""Half of the window, as a share of the number of values."""
LEAST = 4
PASSES = 2
"""A second pass removes the corners that a window with sharp edges leaves."""


def smoothed(points: Points) -> Points:
    """Return the points, each replaced by a straight line through its neighbours, evaluated at its own place.

    The window has as many values before a point as behind it. At the ends, where it cannot, the line extrapolates, so a
    loss that falls steeply at first is not drawn flat. Values that were not finite stay gaps and count for nothing.
    """
    steps = sorted(points)
    values = [points[step] for step in steps]
    places = [index for index, value in enumerate(values) if value is not None]
    line = [value for value in values if value is not None]
    half = max(LEAST, round(SHARE * len(line)))
    for _ in range(PASSES):
        line = _fitted(line, half)
    result: Points = dict.fromkeys(steps)
    for index, value in zip(places, line, strict=True):
        result[steps[index]] = value
    return result


def _fitted(values: Sequence[float], half: int) -> list[float]:
    """Fit a line by least squares in the window of each value, with running sums: O(n) for any window."""
    count = len(values)
    sums = [0.0, *accumulate(values)]
    products = [0.0, *accumulate(index * value for index, value in enumerate(values))]
    fitted = []
    for index in range(count):
        low, high = max(0, index - half), min(count, index + half + 1)
        size = high - low
        middle = (low + high - 1) / 2
        mean = (sums[high] - sums[low]) / size
        # Sum of squared distances from the middle of `size` consecutive whole numbers.
        spread = size * (size * size - 1) / 12
        slope = (products[high] - products[low] - middle * (sums[high] - sums[low])) / spread if spread else 0.0
        value = mean + slope * (index - middle)
        fitted.append(value if math.isfinite(value) else values[index])  # sums of huge values may overflow
    return fitted
