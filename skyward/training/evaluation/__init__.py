"""Evaluation that never makes training wait: a copy of the weights is scored elsewhere while training goes on.

A `Dispatcher` is where evaluations run: threads of this process, a process beside it, nodes of a pool, or several of
those. `AsyncEvaluator` takes the copy, hands it over and gives what came of it, in records. The names that users know
from Hugging Face, Lightning and Keras are in `skyward.training.sakura`.
"""

from ..._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, extra="training")
