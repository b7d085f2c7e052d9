"""Curves of a run's metrics: smoothed lines, and evaluations with the best one marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..evaluation.best import is_greater_better
from .charts import COLOURS, Series
from .records import Points, RunRecord
from .smoothing import smoothed

FIRST = ("loss", "learning_rate", "grad_norm", "tok_per_sec", "mfu", "weight_norm")
"""Order of the first charts; the others follow by name."""
TITLES = {
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "tok_per_sec": "Tokens per second",
    "mfu": "Model FLOPs utilization",
    "weight_norm": "Weight norm",
    "eval_loss": "Loss of evaluations",
    "peak_mem_allocated": "Peak memory allocated, by rank",
    "peak_rss": "Peak resident memory, by rank",
    "grad_norms": "Gradient norms",
    "norms": "Parameter norms",
    "spectral_norms": "Spectral norms",
}
IN_TABLE_ONLY = frozenset({"tokens", "total_flos"})
SPEEDS = ("_runtime", "_per_second")
"""Ends of the names of an evaluation's own durations and rates, which are in the table only."""
NOISY = frozenset({"loss", "grad_norm", "tok_per_sec", "mfu"})
"""Metrics that get a smoothed line if they have many values."""
SMOOTHED_FROM = 60
GREATER_IS_BETTER = ("accuracy", "acc", "f1", "auc", "precision", "recall", "bleu", "score", "r2", "exact_match")
"""Ends of the names of evaluation metrics whose largest value is the best."""

Chart = tuple[str, Sequence[Series], str]
"""Title, lines and unit of a chart."""


def curves(run: RunRecord) -> Iterable[Chart]:
    """Yield the charts of one run, each metric together with its evaluation."""
    names = names_of([run])
    for name in names:
        series = lines_of(name, run.metrics.get(name, {}))
        if f"eval_{name}" in run.evaluations:
            series.append(evaluated(f"eval_{name}", run.evaluations[f"eval_{name}"]))
        yield TITLES.get(name, name), series, ""
    for name in sorted(name for name in run.evaluations if name.removeprefix("eval_") not in names):
        if not name.endswith(SPEEDS):
            yield TITLES.get(name, name), [evaluated(name, run.evaluations[name])], ""


def compared_curves(runs: Sequence[tuple[str, RunRecord]]) -> Iterable[Chart]:
    """Yield one chart per metric and per evaluation metric, with a line for each run that has it."""
    records = [run for _, run in runs]
    for name in names_of(records):
        series: list[Series] = []
        for colour, (label, run) in enumerate(runs):
            if name in run.metrics:
                series += lines_of(label, run.metrics[name], colour=colour, is_noisy=name in NOISY)
        yield TITLES.get(name, name), series, ""
    for name in sorted({name for run in records for name in run.evaluations if not name.endswith(SPEEDS)}):
        yield (
            TITLES.get(name, name),
            [
                evaluated(label, run.evaluations[name], colour=colour, metric=name)
                for colour, (label, run) in enumerate(runs)
                if name in run.evaluations
            ],
            "",
        )


def names_of(runs: Sequence[RunRecord]) -> list[str]:
    """Return the metrics with a chart, in order; an evaluation alone gives its metric a place among the first."""
    metrics = {name for run in runs for name in run.metrics}
    evaluations = {name for run in runs for name in run.evaluations}
    first = [name for name in FIRST if name in metrics or f"eval_{name}" in evaluations]
    return first + sorted(metrics - set(first) - IN_TABLE_ONLY)


def lines_of(name: str, points: Points, *, colour: int = 0, is_noisy: bool | None = None) -> list[Series]:
    """Return a metric's line; a noisy one with many values gets a smoothed line in front of it."""
    is_noisy = name in NOISY if is_noisy is None else is_noisy
    if not is_noisy or len(points) < SMOOTHED_FROM:
        return [Series(name=name, points=points, colour=colour % COLOURS)]
    return [
        Series(name=name, points=points, colour=colour % COLOURS, is_faint=True),
        Series(name=f"{name}, smoothed", points=smoothed(points), colour=colour % COLOURS),
    ]


def evaluated(name: str, points: Points, *, colour: int = 1, metric: str | None = None) -> Series:
    """Return the line of an evaluation metric, with its best value marked."""
    best = best_step(metric or name, points)
    return Series(name=name, points=points, colour=colour % COLOURS, has_dots=True, best=best)


def best_step(metric: str, points: Points) -> int | None:
    """Return the first step with the best value; None if there is no value, or the name does not say what is better."""
    values = {step: value for step, value in sorted(points.items()) if value is not None}
    if not values or metric.endswith(SPEEDS):
        return None
    if not is_greater_better(metric):
        return min(values, key=lambda step: values[step])
    return max(values, key=lambda step: values[step]) if metric.endswith(GREATER_IS_BETTER) else None
