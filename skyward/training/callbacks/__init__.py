"""What watches a run, and what may end it: one callback, or one family of them, a file.

Names are loaded when they are first used.
"""

from ..._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, extra="training")
