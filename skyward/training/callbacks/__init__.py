"""What watches a run, and what may end it: one callback, or one family of them, a file.

Names are loaded when they are first used.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

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

_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_WHERE)  # noqa: PLE0605  # all are strings


def __getattr__(name: str) -> _Any:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
