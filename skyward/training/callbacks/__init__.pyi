"""Public names of the package; `__init__.py` reads this list and loads each name on first use."""

from .control import TrainerControlCallback as TrainerControlCallback
from .diloco import DiLoCoCallback as DiLoCoCallback
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
