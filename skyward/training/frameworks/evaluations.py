"""Options and result rows of asynchronous evaluations, shared by the callbacks of all frameworks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from ...core.signatures import checked_options
from ...errors import UsageError
from ..evaluation.evaluator import AsyncEvaluator, OnError
from ..evaluation.gate import GateMode
from ..evaluation.pace import OnBackpressure
from .foreign import plain

if TYPE_CHECKING:
    from ..evaluation import EvaluationRecord, Timeline
    from ..snapshot import SnapshotPool

Class = TypeVar("Class", bound=type)


class EvaluatorOptions(TypedDict, total=False):
    """Options that are passed on to `AsyncEvaluator`, which defines their meaning, default and checks."""

    cache_key: str | None
    fp16_state_dict: bool
    max_pending: int
    on_backpressure: OnBackpressure
    on_error: OnError
    gate: GateMode
    timeout_s: float | None
    timeline: Timeline | None


class RunOptions(EvaluatorOptions, total=False):
    """Options of callbacks that copy a model on its device."""

    async_copy: bool
    snapshots: SnapshotPool | None


def with_options(options: type) -> Callable[[Class], Class]:
    """Decorate a class whose constructor takes `**options: Unpack[options]`: name each option in its signature.

    Help and errors then know each option, and a misspelled one raises when the object is constructed.
    """

    def decorate(kind: Class) -> Class:
        function: Any = kind.__init__  # type: ignore[misc]  # of this class, not of one below it
        signature, theirs = inspect.signature(function), inspect.signature(AsyncEvaluator).parameters
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(
            parameters=[*own, *(theirs[name] for name in options.__annotations__)]
        )
        return checked_options(kind)

    return decorate


def check_callable(**functions: Any) -> None:
    """Raise UsageError for the first argument that is not callable."""
    for field, function in functions.items():
        if not callable(function):
            raise UsageError(f"{field}={function!r}: must be callable; pass a function")


def row_of(record: EvaluationRecord) -> dict[str, Any]:
    """Make a row of `history`, with Sakura's keys."""
    return {**record.row(), **({"skipped": True} if record.status == "skipped" else {})}


def row_of_epoch(record: EvaluationRecord) -> dict[str, Any]:
    """Make a row of `history` for an evaluation at the end of an epoch."""
    epoch = None if record.epoch is None else int(record.epoch)
    return {**row_of(record), "worker_name": record.worker, "epoch": epoch}


def line_of(record: EvaluationRecord, subject: str, metrics: Mapping[str, Any]) -> str:
    """Make a line for standard output.

    Args:
        record: the evaluation.
        subject: name of the evaluation, such as its step.
        metrics: its metrics, of which the line shows the numbers.
    """
    if record.status in ("skipped", "failed"):
        return f"{subject}: {record.status}: {record.error}"
    numbers = {name: plain(value) for name, value in metrics.items()}
    text = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if isinstance(value, int | float))
    late = ", too late to decide anything" if record.status == "late" else ""
    return f"{subject}: {text} ({record.worker}, {record.elapsed_s or 0:.2f} s{late})"
