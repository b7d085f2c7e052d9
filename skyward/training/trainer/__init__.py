"""PyTorch trainers: `Trainer`, and subclasses for data-parallel, pipeline-parallel and Accelerate runs."""

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
