"""Places where evaluations run: threads of this process, processes beside it, or the nodes of a pool.

`as_dispatcher` turns any value of a user's `compute` into one of them.
"""

from ...._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, extra="training")
