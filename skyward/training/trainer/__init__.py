"""A PyTorch training loop that fires every event: `Trainer`, and those of models in other shapes."""

from .accel import AccelTrainer
from .ddp import DDPTrainer
from .outputs import EvalPrediction, PredictionOutput, TrainOutput
from .pipeline import PipelineTrainer
from .trainer import Trainer

__all__ = [
    "AccelTrainer",
    "DDPTrainer",
    "EvalPrediction",
    "PipelineTrainer",
    "PredictionOutput",
    "TrainOutput",
    "Trainer",
]
