"""Line charts and heat maps as SVG, with the values that the pointer shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .document import round_ticks, svg
from .records import Norms, Points

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 12, 30
MOST_POINTS = 1200
"""Most points of a line, because more would share pixels. Each bucket keeps its smallest and its largest value."""
MOST_COLUMNS, MOST_ROWS = 100, 400
OUTLIERS = 0.02
"""Share of the norms at either end that get the same colour as their neighbours."""
LEVELS = 9
COLOURS = 8
"""Number of line colours in the style sheet; it has LEVELS colours for heat maps."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart. A faint one has single values behind a smoothed line; `best` is a step to mark by a ring."""

    name: str
    points: Points
    colour: int = 0
    is_faint: bool = False
    has_dots: bool = False
    best: int | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart as `svg`, and the `data` for the script, which finds it by the chart's number."""

    svg: str
    data: dict[str, Any]


def line_chart(series: Sequence[Series], *, unit: str = "") -> Chart | None:
    """Draw lines, or return None if no series has a value. `unit` is "bytes" or empty."""
    drawn = [(line, _thinned(line)) for line in series if any(v is not None for v in line.points.values())]
    if not drawn:
        return None
    steps = [step for _, points in drawn for step, _ in points]
    values = [value for _, points in drawn for _, value in points if value is not None]
    x = _Axis(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    low, high = _padded(min(values), max(values))
    y = _Axis(low, high, HEIGHT - BOTTOM, TOP)
    parts = [*_grid(x, y, unit)]
    for line, points in drawn:
        parts.append(_line(line, points, x, y))
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="-9" x2="-9"/>')
    data = {
        "kind": "lines",
        "unit": unit,
        "x": [x.low, x.high, LEFT, WIDTH - RIGHT],
        "series": [
            {"name": line.name, "colour": line.colour, "points": [[step, value] for step, value in points]}
            for line, points in drawn
        ],
    }
    label = ", ".join(line.name for line, _ in drawn)
    return Chart(svg=svg(parts, _size(WIDTH, HEIGHT), label), data=data)


def heat_map(norms: Norms) -> Chart | None:
    """Draw parameters by steps, coloured by the logarithm of the norm; return None if no norm is above zero."""
    steps = _evenly(sorted(set(norms.steps)), MOST_COLUMNS)
    names = list(norms.rows)[:MOST_ROWS]
    positive = sorted(value for name in names for step in steps if (value := norms.rows[name].get(step)))
    if not positive:
        return None
    # One parameter far from the others would leave all of them one colour.
    low, high = (math.log10(positive[round(share * (len(positive) - 1))]) for share in (OUTLIERS, 1 - OUTLIERS))
    left, cell = 230, max(9, min(16, 1200 // max(1, len(names))))
    wide = (WIDTH + 320 - left - RIGHT) / len(steps)
    levels: list[list[str]] = [[] for _ in range(LEVELS)]
    for row, name in enumerate(names):
        for column, step in enumerate(steps):
            value = norms.rows[name].get(step)
            if value:
                share = (math.log10(value) - low) / (high - low) if high > low else 0.5
                at = f"M{left + column * wide:.1f} {TOP + row * cell}h{wide:.1f}v{cell}h-{wide:.1f}z"
                levels[max(0, min(LEVELS - 1, int(share * LEVELS)))].append(at)
    height = TOP + len(names) * cell + BOTTOM
    parts = [f'<path class="h{level}" d="{"".join(cells)}"/>' for level, cells in enumerate(levels) if cells]
    parts += [
        f'<text class="name" x="{left - 6}" y="{TOP + row * cell + cell * 0.8:.0f}">{escape(_shortened(name))}</text>'
        for row, name in enumerate(names)
    ]
    parts += [
        f'<text class="tick" x="{left + (at + 0.5) * wide:.0f}" y="{height - 12}">{steps[at]}</text>'
        for at in _evenly(list(range(len(steps))), 8)
    ]
    data = {
        "kind": "heat",
        "steps": steps,
        "names": names,
        "at": [left, TOP, wide, cell],
        "range": [_short(10**low), _short(10**high)],
        "values": [[_short(norms.rows[name].get(step)) for step in steps] for name in names],
    }
    return Chart(svg=svg(parts, _size(WIDTH + 320, height), "norms of parameters by steps"), data=data)


def in_words(value: float | None, unit: str = "") -> str:
    """Format a number for people: four digits, thousands separated, bytes in their units."""
    if value is None:
        return "not finite"
    if unit == "bytes":
        for size, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if abs(value) >= size:
                return f"{value / size:.4g} {name}"
        return f"{value:.0f} B"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class _Axis:
    """Linear map from values (low to high) to pixels (begin to end)."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.begin + (self.end - self.begin) * ((value - self.low) / span if span else 0.5)

    def ticks(self, about: int) -> list[float]:
        """Return about `about` round numbers."""
        return round_ticks(self.low, self.high, about)


def _grid(x: _Axis, y: _Axis, unit: str) -> list[str]:
    parts = []
    for value in _ticks_of_bytes(y) if unit == "bytes" else y.ticks(5):
        at = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="value" x="{LEFT - 6}" y="{at}" dy="4">{escape(_tick(value, unit))}</text>')
    for value in x.ticks(6):
        if value == int(value):
            parts.append(f'<text class="tick" x="{x(value):.1f}" y="{HEIGHT - 10}">{int(value):,}</text>')
    return parts


def _ticks_of_bytes(y: _Axis) -> list[float]:
    unit = 1024.0 ** math.floor(math.log(max(y.high, 1), 1024))
    scaled = _Axis(y.low / unit, y.high / unit, y.begin, y.end)
    return [value * unit for value in scaled.ticks(5)]


def _tick(value: float, unit: str) -> str:
    if unit == "bytes":
        return in_words(value, unit)
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.3g}"
    return f"{value:,.6g}"


def _line(series: Series, points: Sequence[tuple[int, float | None]], x: _Axis, y: _Axis) -> str:
    """Draw a line with a gap where a value was not finite."""
    path, is_down, dots = [], False, []
    for step, value in points:
        if value is None:
            is_down = False
            continue
        path.append(f"{'L' if is_down else 'M'}{x(step):.1f} {y(value):.1f}")
        is_down = True
        if series.has_dots or len(points) == 1:
            dots.append(f'<circle class="c{series.colour}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="3"/>')
    faint = " faint" if series.is_faint else ""
    drawn = (
        f'<path class="line c{series.colour}{faint}" d="{"".join(path)}"><title>{escape(series.name)}</title></path>'
    )
    if series.best is not None and series.points.get(series.best) is not None:
        value = series.points[series.best]
        assert value is not None
        dots.append(
            f'<path class="ring c{series.colour}" d="M{x(series.best) - 6:.1f} {y(value):.1f}a6 6 0 1 0 12 0a6 6 0 1 0 '
            f'-12 0"><title>best: {in_words(value)} at step {series.best:,}</title></path>'
        )
    return drawn + "".join(dots)


def _size(width: int, height: int) -> str:
    return f'viewBox="0 0 {width} {height}"'


def _thinned(line: Series) -> list[tuple[int, float | None]]:
    points = sorted(line.points.items())
    if len(points) <= MOST_POINTS:
        return points
    size = math.ceil(len(points) / (MOST_POINTS / 2))
    kept: list[tuple[int, float | None]] = []
    key: Callable[[tuple[int, float | None]], float] = lambda point: point[1] if point[1] is not None else math.inf  # noqa: E731
    for begin in range(0, len(points), size):
        bucket = points[begin : begin + size]
        kept += sorted({min(bucket, key=key), max(bucket, key=key)}, key=lambda point: point[0])
    return kept


def _evenly(values: list[Any], most: int) -> list[Any]:
    """Return at most `most` of the values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]


def _padded(low: float, high: float) -> tuple[float, float]:
    span = high - low
    if span <= 0:
        span = abs(high) or 1.0
    return (max(0.0, low - 0.06 * span) if low >= 0 else low - 0.06 * span), high + 0.06 * span


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _shortened(name: str) -> str:
    return name if len(name) <= 38 else f"…{name[-37:]}"
