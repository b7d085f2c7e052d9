"""Consistent copies of a run's state in host memory, shared by several readers."""

from ..._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, extra="training")
