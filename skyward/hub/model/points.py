"""Metric points as columns, the form in which they travel, rest and are read."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


def _integers() -> array[int]:
    return array("q")


def _floats() -> array[float]:
    return array("d")


@dataclass(slots=True)
class PointColumns:
    """Points of any metrics, in the order in which they came.

    Attributes:
        keys: (n,) names of metrics.
        steps: (n,) int64.
        timestamps: (n,) int64, milliseconds since 1970.
        values: (n,) float64. NaN is legal; infinities are stored as the largest finite numbers, as MLflow does.
    """

    keys: list[str] = field(default_factory=list)
    steps: array[int] = field(default_factory=_integers)
    timestamps: array[int] = field(default_factory=_integers)
    values: array[float] = field(default_factory=_floats)

    def append(self, key: str, step: int, timestamp: int, value: float) -> None:
        self.keys.append(key)
        self.steps.append(step)
        self.timestamps.append(timestamp)
        self.values.append(value)

    def extend(self, points: PointColumns) -> None:
        self.keys.extend(points.keys)
        self.steps.extend(points.steps)
        self.timestamps.extend(points.timestamps)
        self.values.extend(points.values)

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(slots=True)
class History:
    """Points of one metric of one run, sorted by (timestamp, step, value), without exact duplicates.

    Attributes:
        next_token: Token of the next page. None where no limit was given, and on the last page.
    """

    key: str
    steps: array[int] = field(default_factory=_integers)
    timestamps: array[int] = field(default_factory=_integers)
    values: array[float] = field(default_factory=_floats)
    next_token: str | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"History(key={self.key!r}, points={len(self)}, next_token={self.next_token!r})"
