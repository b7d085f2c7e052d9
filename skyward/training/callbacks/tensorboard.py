"""Logs and evaluations as TensorBoard scalars, with the run's facts and results as texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError
from ..agree import Ranks
from ..events import Stateful, TrainerCallback
from .columns import format_value, merged
from .evaluations import ReportedOnce
from .info import details_of_run, facts_of_run, text_of
from .metrics import is_known, is_summary
from .summary import ResumableSummaryWriter


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """Rule for one TensorBoard tag.

    A metric that is a list (one number per rank) is written as tag0, tag1, ...

    Args:
        source: the metric's key; empty means the tag with "_" for "-".
        transform: maps `(value, metrics)` to the value to write, or to None for nothing.
    """

    source: str = ""
    transform: Callable[[Any, Mapping[str, Any]], Any] | None = None


def _perplexity(loss: Any, metrics: Mapping[str, Any]) -> float | None:
    try:
        return math.exp(loss)
    except OverflowError:  # the perplexity exceeds the range of a float
        return None


SCALARS: dict[str, Scalar] = {
    "train-loss": Scalar(source="loss"),
    "learning-rate": Scalar(),
    "grad-norm": Scalar(),
    "weight-norm": Scalar(),
    "tok-per-sec": Scalar(),
    "mfu": Scalar(),
    "peak_memory_rank": Scalar(source="peak_mem_allocated"),
    "eval-loss": Scalar(),
    "eval-perplexity": Scalar(source="eval_loss", transform=_perplexity),
}


class TBLogger(TrainerCallback):
    """Write logs, evaluations and the run's facts to TensorBoard.

    Scalars are the metrics in `SCALARS` that are logged or evaluated. Texts are `experiment` (from
    `experiment_info`), `training_info` when a run begins that does not resume, and `train_results` at the end.

    Args:
        summary_writer: torch's SummaryWriter, or a ResumableSummaryWriter, whose state this callback then saves too.
        scalars: changes to the tags. `{tag: {"source", "transform"}}` changes or adds one, `{tag: None}` removes one.
        experiment_info: facts about the experiment as a whole, such as its configuration.

    Raises:
        UsageError: `summary_writer` has no `add_scalar`, or a tag has unknown fields.

    Example:
        >>> from skyward.training import ResumableSummaryWriter
        >>> logger = TBLogger(ResumableSummaryWriter("runs/tiny"), scalars={"mfu": None})
        >>> "mfu" in logger.scalars
        False
    """

    runs_on = "rank_zero"
    on_error = "disable"

    def __init__(
        self,
        summary_writer: Any,
        scalars: Mapping[str, Any] | None = None,
        experiment_info: Mapping[str, Any] | None = None,
    ) -> None:
        self.summary_writer = summary_writer
        self.scalars = merged("scalars", SCALARS, scalars, Scalar)
        if not callable(getattr(summary_writer, "add_scalar", None)):
            raise UsageError(
                f"TBLogger.summary_writer={summary_writer!r}: must be a SummaryWriter; "
                "pass one, such as ResumableSummaryWriter(log_dir)"
            )
        self.experiment_info = experiment_info
        self._results: Mapping[str, Any] | None = None
        self._reported = ReportedOnce()
        self._is_resumed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, ranks: Ranks, **context: Any) -> None:
        if not state.is_world_process_zero:
            return
        self._reported, self._results = ReportedOnce(), None
        if isinstance(self.summary_writer, ResumableSummaryWriter):
            self.summary_writer.on_train_begin(state=state)
        if not self._is_resumed:
            if self.experiment_info is not None:
                self._add_text("experiment", self.experiment_info, state)
            facts = {**facts_of_run(args, state, ranks, **context), **details_of_run(args, **context)}
            self._add_text("training_info", facts, state)
        self._is_resumed = False

    def on_log(self, state: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        if is_summary(logs):
            self._results = {name: value for name, value in logs.items() if is_known(name, value)}
        self._add_scalars(state, self._reported.logged(state.global_step, logs))

    def on_evaluate(self, state: Any, metrics: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._add_scalars(state, self._reported.evaluated(state.global_step, metrics or {}))

    def on_train_end(self, state: Any, **kwargs: Any) -> None:
        results = self._results or (state.log_history[-1] if state.log_history else None)
        if results and state.is_world_process_zero:
            self._add_text("train_results", results, state)
            self.summary_writer.flush()

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.summary_writer, Stateful):
            return {"summary_writer": self.summary_writer.state_dict()}
        self.summary_writer.flush()
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        self._is_resumed = True
        if isinstance(self.summary_writer, Stateful) and "summary_writer" in state_dict:
            self.summary_writer.load_state_dict(state_dict["summary_writer"])

    def close(self) -> None:
        """Flush the writer; also called when a run raises."""
        self.summary_writer.flush()

    def _add_scalars(self, state: Any, metrics: Mapping[str, Any]) -> None:
        if not metrics or not state.is_world_process_zero:
            return
        for tag, scalar in self.scalars.items():
            value = metrics.get(scalar.source or tag.replace("-", "_"))
            if value is not None and scalar.transform is not None:
                value = scalar.transform(value, metrics)
            if isinstance(value, list | tuple):
                for at, item in enumerate(value):
                    self._add_scalar(f"{tag}{at}", item, state)
            elif value is not None:
                self._add_scalar(tag, value, state)
        self.summary_writer.flush()

    def _add_scalar(self, tag: str, value: Any, state: Any) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError):
            return  # the metric is a text, for example
        self.summary_writer.add_scalar(tag, number, global_step=state.global_step)

    def _add_text(self, tag: str, facts: Mapping[str, Any], state: Any) -> None:
        text = text_of({key: format_value(value) for key, value in facts.items()})
        # TensorBoard renders texts as Markdown, which would join the lines to one paragraph.
        self.summary_writer.add_text(tag, f"```\n{text}```", global_step=state.global_step)
