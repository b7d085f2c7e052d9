"""Progress of a run for people: bars in a terminal or a notebook, plain lines in a file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sized
from importlib.util import find_spec
from typing import Any, Literal, TextIO

from ...errors import MissingDependency, UsageError
from ..events import TrainerCallback
from .columns import FINAL_METRICS, STEP_COLUMNS, Column, FinalMetric, format_value, merged
from .evaluations import ReportedOnce
from .metrics import is_known, is_summary, is_training_log

_STEP_WIDTH = 8
_LABEL_WIDTH = 24

OutputStream = TextIO | Literal["stdout", "stderr"]


class ProgressCallback(TrainerCallback):
    """Show a row per log, a line per evaluation, a summary at the end, and progress bars.

    Args:
        use_tqdm: True for bars, False for none; None for bars only in a terminal or a notebook, so that a file has
            lines only. In a notebook without ipywidgets the bars are text.
        output_stream: a text stream, "stdout" or "stderr"; None means standard output, as it is when training begins.
        step_columns: changes to the columns of a row. `{metric: {"label", "width", "fmt"}}` changes or adds one,
            `{metric: None}` removes one. A column is shown if its metric is in the log.
        final_metrics: changes to the summary's lines, as `{"label", "fmt", "suffix"}`. Metrics without an entry come
            last, metrics with None are not shown.
        header_interval: rows between two headers, at least 0. A change of columns prints a header too; 0 means only
            then.

    Raises:
        UsageError: an argument is out of its range, or a column has unknown fields.
        MissingDependency: `use_tqdm` is True and tqdm is not installed.

    Example:
        >>> progress = ProgressCallback(use_tqdm=False, step_columns={"mfu": None, "loss": {"fmt": ".3f"}})
        >>> progress.step_columns["loss"].fmt
        '.3f'
    """

    runs_on = "rank_zero"
    on_error = "disable"

    def __init__(
        self,
        use_tqdm: bool | None = None,
        output_stream: OutputStream | None = None,
        step_columns: Mapping[str, Any] | None = None,
        final_metrics: Mapping[str, Any] | None = None,
        header_interval: int = 20,
    ) -> None:
        if header_interval < 0:
            raise UsageError(
                f"ProgressCallback.header_interval={header_interval!r}: must be at least 0; "
                "set header_interval=0 or more"
            )
        stream_of(output_stream)
        if use_tqdm and find_spec("tqdm") is None:
            raise MissingDependency(
                "ProgressCallback: use_tqdm=True needs tqdm; pip install 'skyward[training]'", name="tqdm"
            )
        self.use_tqdm, self.output_stream, self.header_interval = use_tqdm, output_stream, header_interval
        self.step_columns = merged("step_columns", STEP_COLUMNS, step_columns, Column)
        self.final_metrics = merged("final_metrics", FINAL_METRICS, final_metrics, FinalMetric)
        self._erased = {key for key, spec in (final_metrics or {}).items() if spec is None}
        self._stream: TextIO = sys.stdout
        self._tqdm: Any = None
        self._bar: Any = None
        self._evaluation_bar: Any = None
        self._claimed: int | None = None
        self._evaluation_steps: dict[int | None, int] = {}
        self._is_shown = False
        self._reported = ReportedOnce()
        self._begin_rows()

    # Events ----------------------------------------------------------------------------------------------------------

    def on_train_begin(self, state: Any, **kwargs: Any) -> None:
        self.close()
        self._begin(state)
        self._reported = ReportedOnce()
        self._begin_rows()
        if self._tqdm is not None:
            self._bar = self._tqdm(
                initial=state.global_step, total=_total(state), file=self._stream, dynamic_ncols=True, smoothing=0.03
            )

    def on_step_end(self, state: Any, **kwargs: Any) -> None:
        if self._bar is None:
            return
        is_new_total = self._bar.total != _total(state)
        self._bar.total = _total(state)
        self._bar.update(state.global_step - self._bar.n)
        if is_new_total:
            self._bar.refresh()

    def on_prediction_step(self, state: Any, eval_dataloader: Any = None, **kwargs: Any) -> None:
        if not self._is_shown:
            self._begin(state)  # an evaluation outside a training fires no on_train_begin
        if self._tqdm is None:
            return
        if self._evaluation_bar is None:
            self._claimed = len(eval_dataloader) if isinstance(eval_dataloader, Sized) else None
            # A loader may not know its length, or know another than the evaluation uses. The previous evaluation
            # with the same loader length counted the real one.
            total = self._evaluation_steps.get(self._claimed, self._claimed)
            self._evaluation_bar = self._tqdm(
                total=total, file=self._stream, dynamic_ncols=True, leave=False, desc="evaluation"
            )
        self._evaluation_bar.update(1)

    def on_evaluate(self, state: Any, metrics: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._end_evaluation_bar()
        self._evaluation(state, self._reported.evaluated(state.global_step, metrics or {}))

    def on_predict(self, **kwargs: Any) -> None:
        self._end_evaluation_bar()

    def on_log(self, state: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        if is_summary(logs):
            self._summary(state, logs)
        elif is_training_log(logs):
            self._row(state, {"epoch": state.epoch, **self._reported.logged(state.global_step, logs)})
        else:
            self._evaluation(state, self._reported.logged(state.global_step, logs))

    def on_train_end(self, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the bars; also called when a run raises. Idempotent."""
        for bar in (self._evaluation_bar, self._bar):
            if bar is not None:
                bar.close()
        self._bar = self._evaluation_bar = None

    # Output ----------------------------------------------------------------------------------------------------------

    def _begin(self, state: Any) -> None:
        self._is_shown = bool(state.is_world_process_zero)
        self._stream = stream_of(self.output_stream)
        self._tqdm = _bars(self._stream, self.use_tqdm) if self._is_shown else None

    def _begin_rows(self) -> None:
        self._rows = 0
        self._shown: tuple[str, ...] = ()

    def _row(self, state: Any, logs: Mapping[str, Any]) -> None:
        columns = {key: column for key, column in self.step_columns.items() if logs.get(key) is not None}
        headed = self.header_interval and self._rows % self.header_interval == 0
        if headed or tuple(columns) != self._shown:
            labels = (f"{column.label or key:>{column.width}}" for key, column in columns.items())
            self._write("  ".join((f"{'step':>{_STEP_WIDTH}}", *labels)))
        self._rows, self._shown = self._rows + 1, tuple(columns)
        values = (f"{format_value(logs[key], column.fmt):>{column.width}}" for key, column in columns.items())
        self._write("  ".join((f"{state.global_step:>{_STEP_WIDTH},d}", *values)))

    def _evaluation(self, state: Any, metrics: Mapping[str, Any]) -> None:
        shown = [
            f"{key}: {format_value(value, '.5f' if isinstance(value, float) else '')}"
            for key, value in metrics.items()
            if key not in {"epoch", "step"} and not key.endswith(("_runtime", "_per_second", "_time"))
        ]
        if shown:
            self._write("  ".join((f"{state.global_step:>{_STEP_WIDTH},d}", *shown)))

    def _summary(self, state: Any, logs: Mapping[str, Any]) -> None:
        values = {"step": state.global_step, "epoch": state.epoch, **logs}
        specs = {**self.final_metrics, **{key: FinalMetric() for key in values if key not in self.final_metrics}}
        lines = [
            f"  {(spec.label or key) + ':':<{_LABEL_WIDTH}} {format_value(values[key], spec.fmt)}{spec.suffix}"
            for key, spec in specs.items()
            if values.get(key) is not None and key not in self._erased and is_known(key, values[key])
        ]
        self._write("\n".join(("training has ended", *lines)))

    def _write(self, text: str) -> None:
        if not self._is_shown:
            return
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}"
        if self._tqdm is not None:
            self._tqdm.write(line, file=self._stream)
        else:
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def _end_evaluation_bar(self) -> None:
        bar, self._evaluation_bar = self._evaluation_bar, None
        if bar is not None:
            self._evaluation_steps[self._claimed] = bar.n
            bar.close()


def stream_of(stream: OutputStream | None) -> TextIO:
    """Return the stream, resolving names at the time of the call; raise UsageError for another name."""
    if stream is None or stream == "stdout":
        return sys.stdout
    if stream == "stderr":
        return sys.stderr
    if isinstance(stream, str):
        raise UsageError(f"output_stream={stream!r}: unknown stream; use a text stream, 'stdout' or 'stderr'")
    return stream


def is_notebook(stream: TextIO) -> bool:
    """Return whether writes to `stream` appear in a notebook cell."""
    return type(stream).__module__.startswith(("ipykernel", "google.colab"))


def _is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal with a width; a container's may have no columns, and tqdm draws none."""
    try:
        return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:  # no terminal, or one without a size
        return False


def _bars(stream: TextIO, use_tqdm: bool | None) -> Any:
    """Return the class for bars, or None for plain lines."""
    notebook = is_notebook(stream)
    wanted = use_tqdm if use_tqdm is not None else notebook or _is_terminal(stream)
    if not wanted or find_spec("tqdm") is None:
        return None
    if notebook and find_spec("ipywidgets") is not None:  # tqdm.auto would warn in a notebook without ipywidgets
        from tqdm.notebook import tqdm as of_widgets

        return of_widgets
    from tqdm import tqdm

    return tqdm


def _total(state: Any) -> int | None:
    return state.max_steps if state.max_steps and state.max_steps > 0 else None
