"""Curves in a terminal, drawn with braille dots: pure, from points and a size to rows of coloured text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core.records import dataclass

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a braille cell, by row and column. Source: Unicode, Braille Patterns, U+2800."""

Row = list[tuple[str, str]]
"""Pieces of one line: text and the name of its colour, empty for the terminal's own."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points of one curve, in the order of `xs`. `is_line`: joined by a line; otherwise each is a mark."""

    xs: Sequence[int]
    ys: Sequence[float]
    colour: str
    is_line: bool = True


def chart(curves: Sequence[Curve], width: int, height: int, *, unit: str = "step") -> list[Row]:
    """Draw curves on shared axes, with whole numbers of `unit` below, and at most `width` columns and `height` rows.

    Points that are not finite are left out. Returns nothing if no point is left, or if the size is too small.
    """
    points = [[(x, y) for x, y in zip(c.xs, c.ys, strict=True) if math.isfinite(y)] for c in curves]
    flat = [point for curve in points for point in curve]
    rows = height - 2
    if not flat or rows < 2:
        return []
    low, high = _padded(min(y for _, y in flat), max(y for _, y in flat))
    first, last = min(x for x, _ in flat), max(x for x, _ in flat)
    labels = _labels(low, high, rows)
    margin = max(len(label) for label in labels.values())
    columns = width - margin - 2
    if columns < 8:
        return []
    canvas = _Canvas(columns, rows)
    for curve, own in zip(curves, points, strict=True):
        dots = [(_at(x, first, last, columns * 2), _at(high - y, 0.0, high - low, rows * 4)) for x, y in own]
        if curve.is_line:
            canvas.line(dots, curve.colour)
        else:
            canvas.marks(dots, curve.colour)
    drawn = [[(f"{labels.get(n, ''):>{margin}} ┤", "dim"), *canvas.row(n)] for n in range(rows)]
    return [
        *drawn,
        [(" " * (margin + 1) + "└" + "─" * columns, "dim")],
        [(_scale(first, last, margin, columns, unit), "dim")],
    ]


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers from `low` to `high`, at most `most` of them.

    >>> ticks(0.13, 0.92, 4), ticks(5, 1280, 6)
    ([0.2, 0.4, 0.6, 0.8], [200, 400, 600, 800, 1000, 1200])
    """
    if not high > low or most < 1:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * n for n in (1, 2, 5, 10, 20, 50) if (high - low) / (power * n) <= most)
    # By multiplication, and rounded: sums of 0.1 are not what is to be written there.
    digits = max(0, 1 - math.floor(math.log10(step)))
    found = [round(n * step, digits) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [int(tick) if step >= 1 else tick for tick in found][:most]


def _padded(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - (abs(low) or 1.0) * 0.1, high + (abs(high) or 1.0) * 0.1)


def _at(value: float, low: float, high: float, size: int) -> int:
    """Return the dot of a value on an axis of `size` dots."""
    return 0 if high <= low else min(size - 1, max(0, round((value - low) / (high - low) * (size - 1))))


def _labels(low: float, high: float, rows: int) -> dict[int, str]:
    """Return the labels of the vertical axis, by row."""
    return {_at(high - tick, 0.0, high - low, rows): f"{tick:g}" for tick in ticks(low, high, max(2, rows // 2))}


def _scale(first: int, last: int, margin: int, columns: int, unit: str) -> str:
    """Return the labels of the horizontal axis: whole numbers, below their columns."""
    line = [" "] * columns
    free = 0
    for tick in ticks(first, last, max(1, columns // 12)):
        if tick != int(tick):
            continue
        label = f"{int(tick):,}"
        start = max(0, _at(tick, first, last, columns) - len(label) // 2)
        if start >= free and start + len(label) + 2 + len(unit) <= columns:
            line[start : start + len(label)] = label
            free = start + len(label) + 2
    line[columns - len(unit) :] = unit
    return " " * (margin + 2) + "".join(line).rstrip()


class _Canvas:
    """Cells of 2 x 4 dots. A mark takes a whole cell and hides the dots in it."""

    def __init__(self, columns: int, rows: int) -> None:
        self._bits = [[0] * columns for _ in range(rows)]
        self._colours = [[""] * columns for _ in range(rows)]
        self._marks: dict[tuple[int, int], str] = {}

    def line(self, dots: Sequence[tuple[int, int]], colour: str) -> None:
        for (x, y), (to_x, to_y) in zip(dots, [*dots[1:], dots[-1]] if dots else [], strict=True):
            count = max(abs(to_x - x), abs(to_y - y), 1)
            for n in range(count + 1):
                self._dot(x + round((to_x - x) * n / count), y + round((to_y - y) * n / count), colour)

    def marks(self, dots: Sequence[tuple[int, int]], colour: str) -> None:
        for x, y in dots:
            self._marks[y // 4, x // 2] = colour

    def _dot(self, x: int, y: int, colour: str) -> None:
        self._bits[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
        self._colours[y // 4][x // 2] = colour

    def row(self, number: int) -> Row:
        pieces: Row = []
        for column, bits in enumerate(self._bits[number]):
            mark = self._marks.get((number, column))
            character = "●" if mark else chr(0x2800 + bits) if bits else " "
            colour = mark or (self._colours[number][column] if bits else "")
            if pieces and pieces[-1][1] == colour:
                pieces[-1] = pieces[-1][0] + character, colour
            else:
                pieces.append((character, colour))
        return pieces
