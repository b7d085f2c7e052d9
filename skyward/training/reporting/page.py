"""Page of one run: curves, memory, norms, tables and facts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from .charts import COLOURS, LEVELS, Chart, Series, heat_map, in_words, line_chart
from .curves import TITLES, best_step, curves
from .document import asset, document, legend, table, tiles
from .records import Norms, Points, RunRecord

BYTES = frozenset({"peak_mem_allocated", "peak_rss"})
MOST_LINES = 8
"""Most lines of a chart by rank; with more ranks it shows the largest, middle and smallest value."""
_STATES = {"ended": "The run ended.", "open": "No end is recorded: it is running, was killed or failed."}
MOST_ROWS = 500
"""Rows of the table of evaluations; the latest are kept."""


def page_of(run: RunRecord, *, title: str) -> str:
    """Return the document of a run. Every text from the run is escaped."""
    charts = Charts()
    body = [
        _header(run, title),
        section("Curves", charts.cards(curves(run))),
        section("Memory", charts.cards(_memory(run))),
        section("Norms", "".join(charts.wide(name, norms) for name, norms in run.norms.items())),
        section("Evaluations", _evaluations(run)),
        section("Metrics", _metrics(run)),
        section("The run", _facts(run)),
    ]
    style, script = (asset("skyward.training.reporting", name) for name in ("page.css", "page.js"))
    return document(title, body, style=style, script=script, data=charts.data)


class Charts:
    """Charts of a page, numbered, with their data for the script."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []

    def cards(self, specs: Iterable[tuple[str, Sequence[Series], str]]) -> str:
        """Return the cards of line charts, each given by title, lines and unit; charts without a value are left out."""
        charts = [(title, series, line_chart(series, unit=unit)) for title, series, unit in specs]
        drawn = "".join(self._card(title, chart, _legend(series)) for title, series, chart in charts if chart)
        return f'<div class="charts">{drawn}</div>' if drawn else ""

    def wide(self, name: str, norms: Norms) -> str:
        """Return the card of a heat map."""
        chart = heat_map(norms)
        if chart is None:
            return ""
        shown = len(chart.data["names"])
        pale, deep = (in_words(value) for value in chart.data["range"])
        scale = "".join(f'<i class="h{level}"></i>' for level in range(LEVELS))
        note = f"; the first {shown} of {len(norms.rows)} parameters" if shown < len(norms.rows) else ""
        below = f'<p class="soft scale">{pale} {scale} {deep}, by logarithm{note}</p>'
        return self._card(TITLES.get(name, name), chart, below, kind="card wide")

    def _card(self, title: str, chart: Chart, below: str, *, kind: str = "card") -> str:
        self.data.append(chart.data)
        return (
            f'<div class="{kind}" data-chart="{len(self.data) - 1}"><h3>{escape(title)}</h3>{chart.svg}{below}</div>\n'
        )


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
    kinds = {"largest": -1, "middle": 0, "smallest": 1}
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


# Text and tables ------------------------------------------------------------------------------------------------------


def _header(run: RunRecord, title: str) -> str:
    when = " to ".join(_time(stamp) for stamp in dict.fromkeys((run.began, run.ended)) if stamp is not None)
    lost = [name for name, points in {**run.metrics, **run.evaluations}.items() if None in points.values()]
    problems = [*run.problems]
    if lost:
        problems.append(f"Not finite at some steps: {', '.join(sorted(lost))}.")
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(when)}{" · " if when else ""}{_STATES[state_of(run)]}</p>',
    ]
    parts += [f'<p class="problem">{escape(problem)}</p>' for problem in problems]
    return "\n".join([*parts, tiles(_tiles(run))])


def _tiles(run: RunRecord) -> Iterable[tuple[str, str]]:
    yield "steps", in_words(run.last_step)
    if run.last_epoch is not None:
        yield "epochs", in_words(round(run.last_epoch, 2))
    loss = last_value(run.metrics.get("loss", {}))
    if loss is not None:
        yield "last loss", in_words(loss)
    losses = run.evaluations.get("eval_loss", {})
    best = best_step("eval_loss", losses)
    if best is not None:
        yield f"best eval_loss, at step {best:,}", in_words(losses[best])
    seconds = seconds_of(run)
    if seconds is not None:
        yield "time", duration(seconds)
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
    best = {(best_step(name, points), name) for name, points in run.evaluations.items()}
    marked = {(at, 1 + column) for at, step in enumerate(steps) for column, n in enumerate(names) if (step, n) in best}
    rows = [
        [in_words(step), *(in_words(run.evaluations[n][step]) if step in run.evaluations[n] else "" for n in names)]
        for step in steps
    ]
    return table(["step", *names], rows, best=marked) if rows else ""


def _metrics(run: RunRecord) -> str:
    rows = []
    for name, points in sorted({**run.metrics, **run.evaluations}.items()):
        values = [value for value in points.values() if value is not None]
        if values:
            last = last_value(points)
            rows.append([name, *(in_words(value) for value in (last, min(values), max(values), len(points)))])
    for name, ranks in sorted(run.per_rank.items()):
        unit = "bytes" if name in BYTES else ""
        for rank, points in enumerate(ranks):
            values = [value for value in points.values() if value is not None]
            if values:
                shown = (in_words(value, unit) for value in (last_value(points), min(values), max(values)))
                rows.append([f"{name}, rank {rank}", *shown, in_words(len(points))])
    return table(["metric", "last", "min", "max", "values"], rows) if rows else ""


def _facts(run: RunRecord) -> str:
    facts = {"file": str(run.source), **run.facts, **run.summary}
    parts = [f'<div class="card">{_pairs(facts)}</div>']
    for heading, values in run.info.items():
        if values:
            # Arguments are many, so they are folded.
            is_open = "" if heading == "arguments" else " open"
            parts.append(
                f'<details class="card"{is_open}><summary>{escape(heading.capitalize())} ({len(values)})</summary>'
                f"{_pairs(values)}</details>"
            )
    return "\n".join(parts)


def _pairs(facts: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td>{escape(str(name))}</td><td class="text">{escape(as_text(value))}</td></tr>'
        for name, value in facts.items()
    )
    return f"<table>{rows}</table>"


def as_text(value: Any) -> str:
    """Return a fact as text; dicts and lists as JSON."""
    if isinstance(value, float):
        return in_words(value)
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)


def section(title: str, body: str) -> str:
    """Return a part of the page with its heading, or nothing if it is empty."""
    return f"<h2>{title}</h2>\n{body}" if body else ""


def _legend(series: Sequence[Series]) -> str:
    shown = [line for line in series if not line.is_faint]
    if len(shown) < 2 and all(line.best is None for line in shown):
        return ""
    return legend((f"c{line.colour}", f"{line.name}{_best(line)}") for line in shown)


def _best(line: Series) -> str:
    return "" if line.best is None else f" (best {in_words(line.points[line.best])} at step {line.best:,})"


def last_value(points: Points) -> float | None:
    """Return the value at the last step; None if there is none, or it was not finite."""
    return points[max(points)] if points else None


def _time(stamp: float) -> str:
    return datetime.fromtimestamp(stamp, UTC).strftime("%Y-%m-%d %H:%M UTC")


def seconds_of(run: RunRecord) -> float | None:
    """Return how long a run took, or has taken until its last record."""
    seconds = run.summary.get("train_runtime")
    if isinstance(seconds, (int, float)):
        return seconds
    return None if run.began is None or run.ended is None else run.ended - run.began


def state_of(run: RunRecord) -> str:
    """Return "ended", or "open" if no end is recorded."""
    return "ended" if run.summary else "open"


def duration(seconds: float) -> str:
    """Return a duration for people, in its two largest units."""
    hours, rest = divmod(int(seconds), 3600)
    if hours:
        return f"{hours} h {rest // 60} min"
    return f"{rest // 60} min {rest % 60} s" if rest >= 60 else f"{seconds:.1f} s"
