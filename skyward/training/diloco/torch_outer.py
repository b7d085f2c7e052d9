"""`TorchOuter`: any optimizer of torch as the outer one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


class TorchOuter:
    """Outer optimizer that is one of torch's, such as AdamW or a SGD with weight decay.

    Each parameter has an optimizer of its own. So with streaming, a fragment's steps count for itself alone.

    Args:
        make: Function that returns an optimizer for a list of parameters. It is called for each parameter, and again
            when a server goes on from a save. Then the settings are the new ones, and the moments those of the save.

    Example:
        >>> outer = TorchOuter(lambda parameters: torch.optim.SGD(parameters, lr=0.5, weight_decay=0.2))
        >>> parameters = {"bias": torch.tensor([1.0])}
        >>> outer.step(parameters, {"bias": torch.tensor([1.0])})
        >>> parameters["bias"].tolist()
        [0.3999999761581421]
    """

    def __init__(self, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> None:
        self._make = make
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._saved: dict[str, Any] = {}
        """States of parameters that had no step since they were loaded."""

    def step(self, parameters: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
        """Update in place the parameters that have a gradient."""
        for name, gradient in gradients.items():
            optimizer = self._optimizer_of(name, parameters[name])
            parameter = optimizer.param_groups[0]["params"][0]
            parameter.data, parameter.grad = parameters[name], gradient
            optimizer.step()
            parameter.grad = None

    def _optimizer_of(self, name: str, tensor: torch.Tensor) -> torch.optim.Optimizer:
        if name not in self._optimizers:
            self._optimizers[name] = self._make([torch.nn.Parameter(tensor)])
            if name in self._saved:
                groups = self._optimizers[name].state_dict()["param_groups"]
                self._optimizers[name].load_state_dict({"state": self._saved.pop(name), "param_groups": groups})
        return self._optimizers[name]

    def state_dict(self) -> dict[str, Any]:
        """Return the moments of each parameter, as its optimizer has them."""
        return self._saved | {name: optimizer.state_dict()["state"] for name, optimizer in self._optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with states that `state_dict` returned."""
        self._optimizers, self._saved = {}, dict(state)
