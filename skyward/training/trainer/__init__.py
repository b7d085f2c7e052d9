"""A PyTorch training loop that fires every event: `Trainer` and `DDPTrainer`."""

from .ddp import DDPTrainer
from .outputs import EvalPrediction, PredictionOutput, TrainOutput
from .trainer import Trainer

__all__ = ["DDPTrainer", "EvalPrediction", "PredictionOutput", "TrainOutput", "Trainer"]
