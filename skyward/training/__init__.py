"""Training in any process and framework: trainers, callbacks, checkpoints, evaluation and job control.

    from skyward.training import JsonLogger, Trainer, TrainingArguments

    Trainer(model=model, args=TrainingArguments(output_dir="out"), train_dataset=data, callbacks=[JsonLogger()]).train()

Names are imported when they are first used, so importing the package imports no framework.
"""

from .._lazy import lazy_names as _lazy_names

_OF_OTHERS = ("HFCallbacks", "KerasCallbacks", "LightningCallbacks")
"""Names that a star import leaves out: each imports another framework, and Keras imports TensorFlow."""

__getattr__, __dir__, __all__ = _lazy_names(__name__, __file__, apart=_OF_OTHERS, extra="training")
