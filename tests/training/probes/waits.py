"""How often code waits for the device: counted where it asks for a value, so that a CPU shows it too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

WAITING = {"item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__", "__index__", "nonzero"}


class Waits(TorchFunctionMode):
    """`count` of them in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += getattr(func, "__name__", "") in WAITING
        return func(*args, **(kwargs or {}))
