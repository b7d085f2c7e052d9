"""Evaluation beside training, with the names that users of Sakura know, over `skyward.training.evaluation`.

    from skyward.training.sakura import SakuraHFCallback

    transformers.Trainer(..., callbacks=[SakuraHFCallback(model_factory=..., eval_fn=..., eval_payload=...)])

Names are loaded when they are first used: importing this imports no framework. The modules beside this one have the
paths of Sakura's.
"""

from ..._lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, extra="training")
