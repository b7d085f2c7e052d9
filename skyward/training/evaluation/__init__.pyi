"""Public names of the package; `__init__.py` reads this list and loads each name on first use."""

from .adaptive import AdaptiveCompute as AdaptiveCompute
from .best import BestModel as BestModel
from .callback import AsyncEvaluation as AsyncEvaluation
from .dispatcher import Content as Content
from .dispatcher import Dispatcher as Dispatcher
from .dispatcher import Job as Job
from .dispatcher import Outcome as Outcome
from .evaluator import AsyncEvaluator as AsyncEvaluator
from .members import WorkerState as WorkerState
from .ranks import submit_model as submit_model
from .records import EvaluationRecord as EvaluationRecord
from .spans import TimelineSummary as TimelineSummary
from .timeline import Timeline as Timeline
from .weights import is_sharded as is_sharded
from .weights import load_torch as load_torch
from .weights import load_trainable as load_trainable
from .weights import load_weights as load_weights
from .weights import model_state as model_state
from .weights import sends_parts as sends_parts
