"""What `__init__.py` loads when it is first used, as imports: for checkers and editors."""

from .adapters.hf import HFCallbacks as HFCallbacks
from .agree import Alone as Alone
from .agree import RankFailed as RankFailed
from .agree import Ranks as Ranks
from .agree import TorchRanks as TorchRanks
from .agree import ranks_of_this_process as ranks_of_this_process
from .bus import CallbackHandler as CallbackHandler
from .callbacks import DefaultMetrics as DefaultMetrics
from .callbacks import DivergenceDetector as DivergenceDetector
from .callbacks import JsonLogger as JsonLogger
from .callbacks import JsonLogWriter as JsonLogWriter
from .control.callback import TrainerControlCallback as TrainerControlCallback
from .events import EVENTS as EVENTS
from .events import Stateful as Stateful
from .events import TrainerCallback as TrainerCallback
from .events import TrainerControl as TrainerControl
from .events import TrainerState as TrainerState

__all__ = [
    "Alone",
    "CallbackHandler",
    "DefaultMetrics",
    "DivergenceDetector",
    "EVENTS",
    "JsonLogWriter",
    "JsonLogger",
    "HFCallbacks",
    "RankFailed",
    "Ranks",
    "Stateful",
    "TorchRanks",
    "TrainerCallback",
    "TrainerControl",
    "TrainerControlCallback",
    "TrainerState",
    "ranks_of_this_process",
]
