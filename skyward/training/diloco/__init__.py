"""Training across machines without a fast network (DiLoCo).

Each worker trains alone for H inner steps. A server then averages their progress, takes one outer step, and every
worker goes on from the result.

    from skyward.training.diloco import DiLoCoWorker

    with DiLoCoWorker(model, optimizer, "127.0.0.1:8512", sync_every=500):
        train(model, optimizer)

Papers: DiLoCo (arXiv 2311.08105), asynchronous local SGD (arXiv 2401.09135), Streaming DiLoCo (arXiv 2501.18512).
"""

from ..._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, extra="diloco")
