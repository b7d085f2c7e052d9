"""The page of a run: one HTML file that needs nothing else, no network, no library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from .charts import COLOURS, LEVELS, Chart, Series, heat_map, in_words, line_chart
from .document import asset, document, legend, table, tiles
from .records import Norms, Points, RunRecord

__all__ = ["page_of"]

FIRST = ("loss", "learning_rate", "grad_norm", "tok_per_sec", "mfu", "weight_norm")
"""In this order; others come after them, by name."""
TITLES = {
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "tok_per_sec": "Tokens per second",
    "mfu": "Model FLOPs utilization",
    "weight_norm": "Weight norm",
    "peak_mem_allocated": "Peak memory allocated, by rank",
    "peak_rss": "Peak resident memory, by rank",
    "grad_norms": "Gradient norms",
    "norms": "Parameter norms",
    "spectral_norms": "Spectral norms",
}
IN_TABLE_ONLY = frozenset({"tokens", "total_flos"})
SPEEDS = ("_runtime", "_per_second")
"""Ends of the names of what an evaluation tells of itself: in the table."""
BYTES = frozenset({"peak_mem_allocated", "peak_rss"})
MOST_LINES = 8
"""Of a chart by rank; with more ranks it has their greatest, middle and least."""
SMOOTHING = 0.9
"""Of the line through a loss of many points: the share of what was before."""
SMOOTHED_FROM = 60
MOST_ROWS = 500
"""Of the table of evaluations: the latest."""


def page_of(run: RunRecord, *, title: str) -> str:
    """The whole document. All that comes from the run is escaped."""
    charts = _Charts()
    body = [
        _header(run, title),
        _section("Curves", charts.cards(_curves(run))),
        _section("Memory", charts.cards(_memory(run))),
        _section("Norms", "".join(charts.wide(name, norms) for name, norms in run.norms.items())),
        _section("Evaluations", _evaluations(run)),
        _section("Metrics", _metrics(run)),
        _section("The run", _facts(run)),
    ]
    style, script = (asset("skyward.training.reporting", name) for name in ("page.css", "page.js"))
    return document(title, body, style=style, script=script, data=charts.data)


class _Charts:
    """Numbers the charts, and keeps their data for the script."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []

    def cards(self, wanted: Iterable[tuple[str, Sequence[Series], str]]) -> str:
        found = [(title, series, line_chart(series, unit=unit)) for title, series, unit in wanted]
        drawn = "".join(self._card(title, chart, _legend(series)) for title, series, chart in found if chart)
        return f'<div class="charts">{drawn}</div>' if drawn else ""

    def wide(self, name: str, norms: Norms) -> str:
        chart = heat_map(norms)
        if chart is None:
            return ""
        shown = len(chart.data["names"])
        pale, deep = (in_words(each) for each in chart.data["range"])
        scale = "".join(f'<i class="h{level}"></i>' for level in range(LEVELS))
        note = f"; the first {shown} of {len(norms.rows)} parameters" if shown < len(norms.rows) else ""
        below = f'<p class="soft scale">{pale} {scale} {deep}, by logarithm{note}</p>'
        return self._card(TITLES.get(name, name), chart, below, kind="card wide")

    def _card(self, title: str, chart: Chart, below: str, *, kind: str = "card") -> str:
        self.data.append(chart.data)
        return (
            f'<div class="{kind}" data-chart="{len(self.data) - 1}"><h3>{escape(title)}</h3>{chart.svg}{below}</div>\n'
        )


def _curves(run: RunRecord) -> Iterable[tuple[str, Sequence[Series], str]]:
    names = [*(each for each in FIRST if each in run.metrics or f"eval_{each}" in run.evaluations)]
    names += sorted(set(run.metrics) - set(names) - IN_TABLE_ONLY)
    for name in names:
        series = [*_lines_of(name, run.metrics.get(name, {}))]
        if f"eval_{name}" in run.evaluations:
            series.append(Series(name=f"eval_{name}", points=run.evaluations[f"eval_{name}"], colour=1, has_dots=True))
        yield TITLES.get(name, name), series, ""
    for name in sorted(evaluation for evaluation in run.evaluations if evaluation.removeprefix("eval_") not in names):
        if name.endswith(SPEEDS):
            continue
        yield name, [Series(name=name, points=run.evaluations[name], colour=1, has_dots=True)], ""


def _lines_of(name: str, points: Points) -> Iterable[Series]:
    if name != "loss" or len(points) < SMOOTHED_FROM:
        yield Series(name=name, points=points)
        return
    yield Series(name=name, points=points, is_faint=True)
    smoothed: Points = {}
    mean, weight = 0.0, 0.0
    for step, value in sorted(points.items()):
        if value is not None:
            mean, weight = SMOOTHING * mean + (1 - SMOOTHING) * value, SMOOTHING * weight + (1 - SMOOTHING)
        smoothed[step] = mean / weight if weight and value is not None else None
    yield Series(name=f"{name}, smoothed", points=smoothed)


def _memory(run: RunRecord) -> Iterable[tuple[str, Sequence[Series], str]]:
    for name, ranks in run.per_rank.items():
        unit = "bytes" if name in BYTES else ""
        if len(ranks) <= MOST_LINES:
            series = [
                Series(name=f"rank {rank}", points=points, colour=rank % COLOURS) for rank, points in enumerate(ranks)
            ]
        else:
            series = _spread(ranks)
        yield TITLES.get(name, name), series, unit


def _spread(ranks: Sequence[Points]) -> list[Series]:
    by_step: dict[int, list[float]] = {}
    for points in ranks:
        for step, value in points.items():
            if value is not None:
                by_step.setdefault(step, []).append(value)
    kinds = {"greatest": -1, "middle": 0, "least": 1}
    return [
        Series(
            name=f"{name} of {len(ranks)} ranks",
            points={step: _pick(sorted(values), at) for step, values in by_step.items()},
            colour=colour,
        )
        for colour, (name, at) in enumerate(kinds.items())
    ]


def _pick(values: list[float], at: int) -> float:
    return values[-1] if at < 0 else values[0] if at > 0 else values[len(values) // 2]


# Words and tables -----------------------------------------------------------------------------------------------------


def _header(run: RunRecord, title: str) -> str:
    state = "It has come to its end." if run.summary else "No end is recorded: it runs, was killed or has failed."
    when = " to ".join(_time(fromkey) for fromkey in dict.fromkeys((run.began, run.ended)) if fromkey is not None)
    lost = [name for name, points in {**run.metrics, **run.evaluations}.items() if None in points.values()]
    problems = [*run.problems]
    if lost:
        problems.append(f"Not finite at some steps: {', '.join(sorted(lost))}.")
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="soft">{escape(when)}{" · " if when else ""}{state}</p>']
    parts += [f'<p class="problem">{escape(problem)}</p>' for problem in problems]
    return "\n".join([*parts, tiles(_tiles(run))])


def _tiles(run: RunRecord) -> Iterable[tuple[str, str]]:
    yield "steps", in_words(run.last_step)
    if run.last_epoch is not None:
        yield "epochs", in_words(round(run.last_epoch, 2))
    loss = _last(run.metrics.get("loss", {}))
    if loss is not None:
        yield "last loss", in_words(loss)
    evaluated = [value for value in run.evaluations.get("eval_loss", {}).values() if value is not None]
    if evaluated:
        yield "best eval_loss", in_words(min(evaluated))
    seconds = run.summary.get("train_runtime")
    if not isinstance(seconds, (int, float)) and run.began is not None and run.ended is not None:
        seconds = run.ended - run.began
    if isinstance(seconds, (int, float)):
        yield "time", _duration(seconds)
    for name, label in (("tok_per_sec", "tokens per second, median"), ("mfu", "MFU, median")):
        values = sorted(value for value in run.metrics.get(name, {}).values() if value is not None)
        if values:
            yield label, in_words(values[len(values) // 2])
    for name in sorted(BYTES & set(run.per_rank)):
        peaks = [value for points in run.per_rank[name] for value in points.values() if value is not None]
        if peaks:
            yield "peak memory of a rank", in_words(max(peaks), "bytes")


def _evaluations(run: RunRecord) -> str:
    names = sorted(run.evaluations)
    steps = sorted({step for points in run.evaluations.values() for step in points})[-MOST_ROWS:]
    rows = [
        [in_words(step), *(in_words(run.evaluations[n][step]) if step in run.evaluations[n] else "" for n in names)]
        for step in steps
    ]
    return table(["step", *names], rows) if rows else ""


def _metrics(run: RunRecord) -> str:
    rows = []
    for name, points in sorted({**run.metrics, **run.evaluations}.items()):
        values = [value for value in points.values() if value is not None]
        if values:
            last = _last(points)
            rows.append([name, *(in_words(each) for each in (last, min(values), max(values), len(points)))])
    for name, ranks in sorted(run.per_rank.items()):
        unit = "bytes" if name in BYTES else ""
        for rank, points in enumerate(ranks):
            values = [value for value in points.values() if value is not None]
            if values:
                shown = (in_words(each, unit) for each in (_last(points), min(values), max(values)))
                rows.append([f"{name}, rank {rank}", *shown, in_words(len(points))])
    return table(["metric", "last", "least", "greatest", "values"], rows) if rows else ""


def _facts(run: RunRecord) -> str:
    facts = {"file": str(run.source), **run.facts, **run.summary}
    rows = "".join(
        f'<tr><td>{escape(str(name))}</td><td class="text">{escape(_fact(value))}</td></tr>'
        for name, value in facts.items()
    )
    return f'<div class="card"><table>{rows}</table></div>'


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return in_words(value)
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>\n{body}" if body else ""


def _legend(series: Sequence[Series]) -> str:
    shown = [each for each in series if not each.is_faint]
    if len(shown) < 2:
        return ""
    return legend((f"c{each.colour}", each.name) for each in shown)


def _last(points: Points) -> float | None:
    return points[max(points)] if points else None


def _time(stamp: float) -> str:
    return datetime.fromtimestamp(stamp, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    if hours:
        return f"{hours} h {rest // 60} min"
    return f"{rest // 60} min {rest % 60} s" if rest >= 60 else f"{seconds:.1f} s"
