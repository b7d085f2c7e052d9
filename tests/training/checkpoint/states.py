"""States to save: plain, of real optimizers, and failing ones."""

from __future__ import annotations

from typing import Any

import torch

from skyward.training.checkpoint import SharingPattern, StateComponent, ValidationLevel


class Box:
    """Owner of a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


class Refuses(Box):
    def state_dict(self) -> Any:
        raise ValueError("no state today")


class Unwritable(Box):
    """Component whose state cannot be written: it fails while the file is being made."""

    class Thing:
        def __reduce__(self) -> Any:
            raise OSError(28, "No space left on device")

    def state_dict(self) -> Any:
        return {"weight": torch.zeros(1000), "thing": self.Thing()}


def shard(index: int, *, size: int = 64) -> dict[str, Any]:
    """Return a model's and optimizer's nested state. It differs for every index, and is the same on every rank."""
    generator = torch.Generator().manual_seed(1000 + index)
    return {
        "layer.weight": torch.randn(size, generator=generator),
        "layer.half": torch.randn(size, generator=generator).bfloat16(),
        "state": {0: {"step": torch.tensor(3 + index), "exp_avg": torch.randn(size, generator=generator)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0]}],
    }


def same(one: Any, other: Any) -> bool:
    """Compare bit by bit."""
    from skyward.training.checkpoint.validate import fingerprints

    return fingerprints(one, ValidationLevel.TENSOR) == fingerprints(other, ValidationLevel.TENSOR)


def part(key: str, stateful: Any, pattern: str, group: str | None = None, **options: Any) -> StateComponent:
    """Make a component, with pattern and level given by their values."""
    if "validation_level" in options:
        options["validation_level"] = ValidationLevel(options["validation_level"])
    return StateComponent(key, stateful, SharingPattern(pattern), group, **options)
