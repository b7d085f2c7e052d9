"""What `__init__.py` loads when it is first used, as imports: for checkers and editors."""

from .control import TrainerControlCallback as TrainerControlCallback
from .divergence import DivergenceDetector as DivergenceDetector
from .info import InfoCallback as InfoCallback
from .jsonlog import JsonLogger as JsonLogger
from .jsonlog import JsonLogWriter as JsonLogWriter
from .metrics import DefaultMetrics as DefaultMetrics
from .progress import ProgressCallback as ProgressCallback

__all__ = [
    "DefaultMetrics",
    "DivergenceDetector",
    "InfoCallback",
    "JsonLogWriter",
    "JsonLogger",
    "ProgressCallback",
    "TrainerControlCallback",
]
