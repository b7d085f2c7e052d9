"""Model, optimizer and run as checkpoints see them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .world import is_sharded

__all__ = ["ModelState", "OptimizerState", "RunState", "write_weights"]


class ModelState:
    """The weights, under the names of the user's own module. Of a sharded model: whole, on the CPU, gathered by all
    ranks; each takes its part when they are loaded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        if is_sharded(self._model):
            from torch.distributed.checkpoint.state_dict import get_model_state_dict

            return get_model_state_dict(self._model, options=_options())
        return dict(self._model.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        if is_sharded(self._model):
            from torch.distributed.checkpoint.state_dict import set_model_state_dict

            set_model_state_dict(self._model, state_dict, options=_options())
        else:
            self._model.load_state_dict(state_dict)


class OptimizerState:
    """As `ModelState`, of an optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        if is_sharded(self._model):
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            return get_optimizer_state_dict(self._model, self._optimizer, options=_options())
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        if is_sharded(self._model):
            from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

            set_optimizer_state_dict(self._model, self._optimizer, state_dict, options=_options())
        else:
            self._optimizer.load_state_dict(state_dict)


class RunState:
    """Where the run is. What ranks have for themselves is gathered beforehand, since one rank writes it for all."""

    def __init__(
        self,
        give: Callable[[], dict[str, Any]],
        take: Callable[[dict[str, Any], dict[str, Any]], None],
        gather: Callable[[], dict[str, Any]],
    ) -> None:
        self._give, self._take, self._gather = give, take, gather

    def state_dict(self) -> dict[str, Any]:
        """Collective."""
        return {**self._give(), "record": self._gather()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._take(state_dict, state_dict["record"])


def write_weights(folder: str, weights: Mapping[str, torch.Tensor]) -> None:
    """As `folder/model.safetensors`. Tied weights are written once for each of their names: it has no aliases."""
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    own = {name: value.detach().cpu().clone().contiguous() for name, value in weights.items()}
    save_file(own, os.path.join(folder, "model.safetensors"))


def _options() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=True)
