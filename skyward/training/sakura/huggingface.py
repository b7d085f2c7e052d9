"""Sakura's name of the module with `SakuraHFCallback`."""

from typing import TYPE_CHECKING

from ..._lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from .hf import SakuraHFCallback

__getattr__, __dir__, _ = _lazy_names(__name__, {"..hf": ("SakuraHFCallback",)})
__all__ = ["SakuraHFCallback"]
