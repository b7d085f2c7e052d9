"""Training: one event model, its callbacks, job control and checkpoints, in any process and any framework.

    from skyward.training import JsonLogger, Trainer, TrainingArguments

    Trainer(model=model, args=TrainingArguments(output_dir="out"), train_dataset=data, callbacks=[JsonLogger()]).train()

Names are loaded when they are first used: importing this imports no framework.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from . import callbacks as _callbacks

_MODULES = {
    "adapters.hf": ("HFCallbacks",),
    "adapters.keras": ("KerasCallbacks",),
    "adapters.lightning": ("LightningCallbacks",),
    "agree": ("Alone", "RankFailed", "Ranks", "TorchRanks", "ranks_of_this_process"),
    "arguments": ("DDPTrainingArguments", "TrainingArguments"),
    "bus": ("CallbackHandler",),
    "callbacks": tuple(_callbacks.__all__),
    "checkpoint": ("Checkpoints", "FileCheckpoints", "RNGState", "SharingPattern", "StateComponent"),
    "reporting": ("report",),
    "events": ("EVENTS", "Stateful", "TrainerCallback", "TrainerControl", "TrainerState"),
    "trainer": ("DDPTrainer", "EvalPrediction", "PredictionOutput", "TrainOutput", "Trainer"),
}
_SUBMODULES = ("evaluation",)

_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted((*_WHERE, *_SUBMODULES))  # noqa: PLE0605  # all are strings


def __getattr__(name: str) -> _Any:
    if name in _SUBMODULES:
        return _import_module(f"{__name__}.{name}")
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
