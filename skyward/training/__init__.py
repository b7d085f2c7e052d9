"""Training: one event model, its callbacks, job control and checkpoints, in any process and any framework.

    from skyward.training import JsonLogger, Trainer, TrainingArguments

    Trainer(model=model, args=TrainingArguments(output_dir="out"), train_dataset=data, callbacks=[JsonLogger()]).train()

Names are loaded when they are first used: importing this imports no framework.
"""

from .._lazy import lazy_names as _lazy_names
from . import callbacks as _callbacks

_MODULES = {
    "adapters.hf": ("HFCallbacks",),
    "adapters.keras": ("KerasCallbacks",),
    "adapters.lightning": ("LightningCallbacks",),
    "agree": ("Alone", "RankFailed", "Ranks", "TorchRanks", "ranks_of_this_process"),
    "arguments": ("DDPTrainingArguments", "TrainingArguments"),
    "asynchronous": ("asynchronously",),
    "bus": ("CallbackHandler",),
    "callbacks": tuple(_callbacks.__all__),
    "checkpoint": ("Checkpoints", "FileCheckpoints", "RNGState", "SharingPattern", "StateComponent"),
    "reporting": ("report",),
    "events": ("EVENTS", "Stateful", "TrainerCallback", "TrainerControl", "TrainerState"),
    "trainer": (
        "AccelTrainer",
        "DDPTrainer",
        "EvalPrediction",
        "PipelineTrainer",
        "PredictionOutput",
        "TrainOutput",
        "Trainer",
    ),
}
_SUBMODULES = ("evaluation", "sakura")

_OF_OTHERS = ("HFCallbacks", "KerasCallbacks", "LightningCallbacks")
"""A star import leaves them out: each imports another framework, and Keras imports TensorFlow."""

__getattr__, __dir__, __all__ = _lazy_names(__name__, _MODULES, _SUBMODULES, apart=_OF_OTHERS, extra="training")
