"""Sakura's name of the module with `SakuraKerasCallback`."""

from typing import TYPE_CHECKING

from ..._lazy import lazy_names as _lazy_names

if TYPE_CHECKING:
    from .keras import SakuraKerasCallback

__getattr__, __dir__, _ = _lazy_names(__name__, {"..keras": ("SakuraKerasCallback",)})
__all__ = ["SakuraKerasCallback"]
