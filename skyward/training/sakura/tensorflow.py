"""Module path of `SakuraKerasCallback` in Sakura."""

from ..._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__)
