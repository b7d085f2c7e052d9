"""Count of waits for the device. Reads of values are counted, so that a CPU shows them too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

WAITING = {"item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__", "__index__", "nonzero"}


class Waits(TorchFunctionMode):
    """Waits within a block, in `count`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += getattr(func, "__name__", "") in WAITING
        return func(*args, **(kwargs or {}))
