"""Asynchronous evaluation during training, under the names of the Sakura library.

    from skyward.training.sakura import SakuraHFCallback

    transformers.Trainer(..., callbacks=[SakuraHFCallback(model_factory=..., eval_fn=..., eval_payload=...)])

It builds on `skyward.training.evaluation`. Names are imported when they are first used, so importing the package
imports no framework. Its modules have the same paths as Sakura's.
"""

from ..._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, extra="training")
