"""What watches a run, and what may end it: one callback, or one family of them, a file.

Names are loaded when they are first used.
"""

from ..._lazy import lazy_names as _lazy_names

_MODULES = {
    "control": ("TrainerControlCallback",),
    "divergence": ("DivergenceDetector",),
    "grad_norm": ("GradNormLogger",),
    "jsonlog": ("JsonLogWriter", "JsonLogger"),
    "metrics": ("DefaultMetrics",),
    "progress": ("ProgressCallback",),
    "info": ("InfoCallback",),
    "parameter_norm": ("ParameterNormLogger",),
    "peak_memory": ("PeakMemory",),
    "profiler": ("ProfilerCallback",),
    "textgen": ("TextgenCallback",),
    "weight_norm": ("WeightNormLogger",),
    "summary": ("ResumableSummaryWriter",),
    "tensorboard": ("TBLogger",),
}

__getattr__, __dir__, __all__ = _lazy_names(__name__, _MODULES, extra="training")
