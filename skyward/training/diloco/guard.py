"""Checks of a delta before it enters the mean: one broken worker must not spoil the parameters of all."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from .arrays import Array
from .refusal import RefusalKind, WorkerRefused

MOST_TIMES_MEDIAN = 10.0
"""Largest norm of a delta, as a multiple of the running median."""
WINDOW = 64
"""Number of norms in the running median."""
LEAST_NORMS = 3
"""Number of norms before which there is no running median: of two norms, nobody knows which is the odd one."""


def check_shapes(worker: str, delta: Mapping[str, Array], parameters: Mapping[str, Array]) -> None:
    """Check that a delta fits the parameters that it shall change.

    Raises:
        WorkerRefused: Names are missing or unexpected, or a shape differs; the message names each.
    """
    problems = [
        f"{problem} {', '.join(names)}"
        for problem, names in (
            ("missing", sorted(parameters.keys() - delta.keys())),
            ("unexpected", sorted(delta.keys() - parameters.keys())),
            ("other shapes for", [name for name, array in delta.items() if _differs(array, parameters.get(name))]),
        )
        if names
    ]
    if problems:
        raise _refused(worker, f"its delta does not fit the model ({'; '.join(problems)}); give it the server's model")


def _differs(array: Array, parameter: Array | None) -> bool:
    return parameter is not None and tuple(array.shape) != tuple(parameter.shape)


class NormGuard:
    """Refuse deltas that are not finite, or far larger than usual.

    The running median is that of the last norms of all workers. It also holds the norms of refused deltas, if finite.
    So one broken worker cannot raise it, and a lasting change for all workers is accepted after half a window.

    In synchronous rounds, call `record` when a round closes, in the order of worker ids. Then no decision depends on
    the order of arrival, and a repeated run is equal to the bit. Fragments need a guard each, because their norms
    differ.

    Example:
        >>> guard = NormGuard()
        >>> guard.record([1.0, 1.2, 0.9])
        >>> guard.check("w3", 8.0)
        >>> try:
        ...     guard.check("w3", 25.0)
        ... except WorkerRefused as refusal:
        ...     refusal.kind.value
        'bad_delta'
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def check(self, worker: str, norm: float) -> None:
        """Check the norm of a worker's delta.

        Raises:
            WorkerRefused: The norm is NaN or infinite, or over 10 times the running median.
        """
        if not math.isfinite(norm):
            raise _refused(worker, f"the norm of its delta is {norm}; check its loss, and load the current parameters")
        usual = median(self._norms) if len(self._norms) >= LEAST_NORMS else 0.0
        if norm > MOST_TIMES_MEDIAN * usual > 0:
            raise _refused(
                worker,
                f"the norm of its delta is {norm:g}, over {MOST_TIMES_MEDIAN:g} times the running median of {usual:g}; "
                "check its data and learning rate",
            )

    def record(self, norms: Iterable[float]) -> None:
        """Add norms to the running median, also those of refused deltas. Norms that are not finite are left out."""
        self._norms.extend(norm for norm in norms if math.isfinite(norm))

    def state_dict(self) -> dict[str, Any]:
        """Return the norms, oldest first, as values for JSON."""
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue with norms that `state_dict` returned."""
        self._norms = deque(state["norms"], maxlen=WINDOW)


def _refused(worker: str, problem: str) -> WorkerRefused:
    return WorkerRefused(
        RefusalKind.BAD_DELTA, f"worker={worker!r}: {problem}"
    )  # words: ok, its callers say what to do
