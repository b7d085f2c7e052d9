"""Evaluation that never makes training wait: a copy of the weights is scored elsewhere while training goes on.

A `Dispatcher` is where evaluations run: threads of this process, a process beside it, nodes of a pool, or several of
those. `AsyncEvaluator` takes the copy, hands it over and gives what came of it, in records. The names that users know
from Hugging Face, Lightning and Keras are in `skyward.training.sakura`.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

_MODULES = {
    "dispatcher": ("Content", "Dispatcher", "Job", "Outcome"),
    "records": ("EvaluationRecord",),
    "timeline": ("Timeline", "TimelineSummary"),
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
