"""What `__init__.py` loads when it is first used, as imports: for checkers and editors."""

from .adapters.hf import HFCallbacks as HFCallbacks
from .adapters.keras import KerasCallbacks as KerasCallbacks
from .adapters.lightning import LightningCallbacks as LightningCallbacks
from .agree import Alone as Alone
from .agree import RankFailed as RankFailed
from .agree import Ranks as Ranks
from .agree import TorchRanks as TorchRanks
from .agree import ranks_of_this_process as ranks_of_this_process
from .arguments import DDPTrainingArguments as DDPTrainingArguments
from .arguments import TrainingArguments as TrainingArguments
from .asynchronous import asynchronously as asynchronously
from .bus import CallbackHandler as CallbackHandler
from .callbacks import DefaultMetrics as DefaultMetrics
from .callbacks import DivergenceDetector as DivergenceDetector
from .callbacks import GradNormLogger as GradNormLogger
from .callbacks import InfoCallback as InfoCallback
from .callbacks import JsonLogger as JsonLogger
from .callbacks import JsonLogWriter as JsonLogWriter
from .callbacks import ParameterNormLogger as ParameterNormLogger
from .callbacks import PeakMemory as PeakMemory
from .callbacks import ProfilerCallback as ProfilerCallback
from .callbacks import ProgressCallback as ProgressCallback
from .callbacks import ResumableSummaryWriter as ResumableSummaryWriter
from .callbacks import TBLogger as TBLogger
from .callbacks import TextgenCallback as TextgenCallback
from .callbacks import WeightNormLogger as WeightNormLogger
from .checkpoint import Checkpoints as Checkpoints
from .checkpoint import FileCheckpoints as FileCheckpoints
from .checkpoint import RNGState as RNGState
from .checkpoint import SharingPattern as SharingPattern
from .checkpoint import StateComponent as StateComponent
from .control.callback import TrainerControlCallback as TrainerControlCallback
from .events import EVENTS as EVENTS
from .events import Stateful as Stateful
from .events import TrainerCallback as TrainerCallback
from .events import TrainerControl as TrainerControl
from .events import TrainerState as TrainerState
from .reporting import report as report
from .trainer import AccelTrainer as AccelTrainer
from .trainer import DDPTrainer as DDPTrainer
from .trainer import EvalPrediction as EvalPrediction
from .trainer import PipelineTrainer as PipelineTrainer
from .trainer import PredictionOutput as PredictionOutput
from .trainer import Trainer as Trainer
from .trainer import TrainOutput as TrainOutput

__all__ = [
    "AccelTrainer",
    "Alone",
    "CallbackHandler",
    "Checkpoints",
    "DDPTrainer",
    "DDPTrainingArguments",
    "DefaultMetrics",
    "DivergenceDetector",
    "EVENTS",
    "EvalPrediction",
    "FileCheckpoints",
    "GradNormLogger",
    "InfoCallback",
    "JsonLogWriter",
    "JsonLogger",
    "ParameterNormLogger",
    "PeakMemory",
    "PipelineTrainer",
    "PredictionOutput",
    "ProfilerCallback",
    "ProgressCallback",
    "RNGState",
    "RankFailed",
    "Ranks",
    "ResumableSummaryWriter",
    "SharingPattern",
    "StateComponent",
    "Stateful",
    "TBLogger",
    "TextgenCallback",
    "TorchRanks",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerControlCallback",
    "TrainerState",
    "TrainingArguments",
    "WeightNormLogger",
    "asynchronously",
    "ranks_of_this_process",
    "report",
]
