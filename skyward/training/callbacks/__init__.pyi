"""What `__init__.py` loads when it is first used, as imports: for checkers and editors."""

from .control import TrainerControlCallback as TrainerControlCallback
from .divergence import DivergenceDetector as DivergenceDetector
from .grad_norm import GradNormLogger as GradNormLogger
from .info import InfoCallback as InfoCallback
from .jsonlog import JsonLogger as JsonLogger
from .jsonlog import JsonLogWriter as JsonLogWriter
from .metrics import DefaultMetrics as DefaultMetrics
from .parameter_norm import ParameterNormLogger as ParameterNormLogger
from .peak_memory import PeakMemory as PeakMemory
from .profiler import ProfilerCallback as ProfilerCallback
from .progress import ProgressCallback as ProgressCallback
from .summary import ResumableSummaryWriter as ResumableSummaryWriter
from .tensorboard import TBLogger as TBLogger
from .textgen import TextgenCallback as TextgenCallback
from .weight_norm import WeightNormLogger as WeightNormLogger

__all__ = [
    "DefaultMetrics",
    "DivergenceDetector",
    "GradNormLogger",
    "InfoCallback",
    "JsonLogWriter",
    "JsonLogger",
    "ParameterNormLogger",
    "PeakMemory",
    "ProfilerCallback",
    "ProgressCallback",
    "ResumableSummaryWriter",
    "TBLogger",
    "TextgenCallback",
    "TrainerControlCallback",
    "WeightNormLogger",
]
