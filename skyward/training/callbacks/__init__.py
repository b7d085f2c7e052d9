"""Callbacks that log, measure, profile or stop a training run.

Names are loaded on first use, so importing the package imports no framework.
"""

from ..._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, extra="training")
