"""Arithmetic of DiLoCo: pseudo-gradients, the outer optimizer, and mixing.

Parameters, deltas and buffers are mappings from a parameter's name to its array (see `arrays`). All functions are
deterministic: equal inputs give equal bits on one machine.

Sources: "DiLoCo" (arXiv 2311.08105), "Asynchronous Local-SGD" (arXiv 2401.09135), "Streaming DiLoCo" (2501.18512).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from types import EllipsisType
from typing import Any, Protocol

from ...errors import UsageError
from ..evaluation.legal import check_at_least
from .arrays import Array, add_scaled, copy_of, empty_like

OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9
"""Defaults of the outer optimizer. Source: arXiv 2311.08105 (best outer optimizer)."""


def pseudo_gradient(base: Array, local: Array) -> Array:
    """Return `base - local`: a step against it moves the base towards the local parameters.

    Args:
        base: Parameter as the worker last received it, any shape, float32.
        local: The same parameter after the inner steps, the same shape, float32 or narrower.

    Returns:
        A new array, float32. The subtraction is exact where both lie within a factor of two of each other.

    Source: arXiv 2311.08105, algorithm 1 (the outer gradient).
    """
    delta = copy_of(base)  # `base - local` would be no array for numpy arrays of shape ()
    delta -= local
    return delta


class OuterOptimizer(Protocol):
    """Optimizer of the global parameters, which treats a pseudo-gradient as a gradient.

    Example:
        class Averaging:
            def step(self, parameters, gradients):
                for name, gradient in gradients.items():
                    parameters[name] -= gradient

            def state_dict(self):
                return {}

            def load_state_dict(self, state):
                pass
    """

    def step(self, parameters: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Update in place the parameters that have a gradient. All others keep their value and their momentum."""

    def state_dict(self) -> dict[str, Any]:
        """Return nested dicts of arrays and numbers. The arrays are the optimizer's own, not copies."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state_dict` returned, with its arrays."""


Part = slice | EllipsisType
"""Part of an array: a slice of its flat values, or `...` for all of them in their shape."""

PartStep = Callable[[Part, Array, Array], None]
"""Step of one parameter for a part of it: the part, its values, which change in place, and their gradient.

All parts must come, each once. So a server takes the step while values are in the processor's cache.
"""


class OuterSGD:
    """SGD with momentum. On tensors it equals `torch.optim.SGD` (dampening 0, no weight decay) to the bit.

    For numpy arrays, each product is rounded before it is added, so the last bit may differ from torch's.

    Args:
        lr: Step size, > 0.
        momentum: Decay of the momentum, >= 0 and < 1. With 0 there are no buffers.
        nesterov: Step along the gradient plus the decayed momentum, instead of along the momentum.

    Example:
        >>> import numpy as np
        >>> parameters = {"bias": np.array([1.0], "float32")}
        >>> OuterSGD(lr=0.5, momentum=0.0, nesterov=False).step(parameters, {"bias": np.array([1.0], "float32")})
        >>> parameters["bias"].tolist()
        [0.5]

    Source: arXiv 2311.08105, algorithm 1 (OuterOpt); `torch.optim.SGD`.
    """

    def __init__(self, *, lr: float = OUTER_LR, momentum: float = OUTER_MOMENTUM, nesterov: bool = True) -> None:
        _check_rates(lr, momentum)
        if nesterov and momentum == 0:
            raise UsageError("nesterov=True: has no meaning without momentum; set momentum above 0, or nesterov=False")
        self.lr, self.momentum, self.nesterov = lr, momentum, nesterov
        self._momenta: dict[str, Array] = {}

    def step(self, parameters: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        for name, gradient in gradients.items():
            self.begin(name, parameters[name])(..., parameters[name], gradient)

    def begin(self, name: str, parameter: Array) -> PartStep:
        """Begin a step of one parameter, and return a function that takes it, part by part; see `PartStep`."""
        momenta = _Accumulator(self._momenta, name, parameter) if self.momentum else None

        def step(part: Part, values: Array, gradient: Array) -> None:
            direction = gradient
            if momenta is not None:
                direction = momentum = momenta.add(part, gradient, decay=self.momentum)
                if self.nesterov:
                    direction = copy_of(gradient)
                    add_scaled(direction, momentum, self.momentum)
            add_scaled(values, direction, -self.lr)

        return step

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": dict(self._momenta)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._momenta = dict(state["momenta"])


class DelayedNesterov:
    """Nesterov momentum for asynchronous workers: one update of the momentum for every N pseudo-gradients.

    With a momentum m, a step size e, a decay b, and a pseudo-gradient g for each step:

        each step        sum += g
        steps 1 to N-1   parameter -= e * g / N
        step N           m = b * m + sum / N;  parameter -= e * (g / N + b * m);  sum = 0

    Each parameter counts its own steps, so fragments have their own delays. `every=1` equals `OuterSGD` with Nesterov
    momentum, to the bit.

    Args:
        lr: Step size e, > 0.
        momentum: Decay b, >= 0 and < 1.
        every: N, the number of pseudo-gradients between two updates of the momentum, >= 1.

    Example:
        >>> import numpy as np
        >>> parameters = {"bias": np.array([1.0], "float32")}
        >>> DelayedNesterov(lr=0.5, every=2).step(parameters, {"bias": np.array([1.0], "float32")})
        >>> parameters["bias"].tolist()
        [0.75]

    Source: arXiv 2401.09135, algorithm 3 with c = 0.
    """

    def __init__(self, *, lr: float = OUTER_LR, momentum: float = OUTER_MOMENTUM, every: int = 1) -> None:
        _check_rates(lr, momentum)
        check_at_least("every", every, 1)
        self.lr, self.momentum, self.every = lr, momentum, every
        self._momenta: dict[str, Array] = {}
        self._sums: dict[str, Array] = {}
        self._counts: dict[str, int] = {}

    def step(self, parameters: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        for name, gradient in gradients.items():
            self.begin(name, parameters[name])(..., parameters[name], gradient)

    def begin(self, name: str, parameter: Array) -> PartStep:
        """Begin a step of one parameter, and return a function that takes it, part by part; see `PartStep`."""
        sums, momenta = _Accumulator(self._sums, name, parameter), None
        self._counts[name] = self._counts.get(name, 0) + 1
        if self._counts[name] == self.every:
            momenta = _Accumulator(self._momenta, name, parameter)
            self._counts[name] = 0
            del self._sums[name]

        def step(part: Part, values: Array, gradient: Array) -> None:
            mean = sums.add(part, gradient)
            direction = copy_of(gradient)
            direction /= self.every
            if momenta is not None:
                mean /= self.every
                add_scaled(direction, momenta.add(part, mean, decay=self.momentum), self.momentum)
            add_scaled(values, direction, -self.lr)

        return step

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": dict(self._momenta), "sums": dict(self._sums), "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._momenta, self._sums = dict(state["momenta"]), dict(state["sums"])
        self._counts = dict(state["counts"])


def mix(local: Array, received: Array, alpha: float) -> None:
    """Set `local` to `alpha * local + (1 - alpha) * received`, in place.

    While a fragment was on its way, the worker has trained on. `alpha` is the weight of that progress. 0 gives exactly
    the received values, even where the local ones are not finite. 1 changes nothing. The fragment's next base is
    `received` in any case.

    Args:
        local: Parameter of the worker, any shape.
        received: The same parameter after the outer step, the same shape.
        alpha: Between 0 and 1.

    Raises:
        UsageError: `alpha` is not between 0 and 1.

    Source: arXiv 2501.18512, algorithm 2.
    """
    if not 0 <= alpha <= 1:
        raise UsageError(f"alpha={alpha!r}: must be between 0 and 1; set alpha=0.5, for example")
    if alpha == 0:
        local[...] = received
    elif alpha < 1:
        local *= alpha
        add_scaled(local, received, 1 - alpha)


def _check_rates(lr: float, momentum: float) -> None:
    if not (math.isfinite(lr) and lr > 0):
        raise UsageError(f"lr={lr!r}: must be a finite number > 0; set lr={OUTER_LR}, for example")
    if not 0 <= momentum < 1:
        raise UsageError(f"momentum={momentum!r}: must be >= 0 and < 1; set momentum={OUTER_MOMENTUM}, for example")


class _Accumulator:
    """Running sum of a parameter's gradients, which decays. It is kept by its name, and filled part by part."""

    def __init__(self, table: MutableMapping[str, Array], name: str, parameter: Array) -> None:
        self._is_new = name not in table
        if self._is_new:
            table[name] = empty_like(parameter)
        self._sums = table[name]

    def add(self, part: Part, gradient: Array, *, decay: float = 1.0) -> Array:
        """Add a gradient to a part that has decayed, and return the part. A new one is a copy of the gradient."""
        sums = self._sums if part is ... else self._sums.reshape(-1)[part]
        if self._is_new:
            sums[...] = gradient
            return sums
        if decay != 1:
            sums *= decay
        sums += gradient
        return sums
