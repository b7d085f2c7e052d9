"""Evaluation beside training: a copy of the weights is scored elsewhere while training continues.

A `Dispatcher` runs evaluations: threads of this process, a process beside it, nodes of a pool, or several of these.
`AsyncEvaluator` copies the weights, hands them over and returns the results as records. `skyward.training.sakura` has
the same under the names that users know from Hugging Face, Lightning and Keras.
"""

from ..._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, extra="training")
