"""A timeline as one HTML file: a lane for training, snapshots, transfers and each worker, and what it amounts to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

from ..reporting.document import asset, document, legend, round_ticks, svg, table, tiles
from .spans import QUEUE, SNAPSHOT, TRAINING, TRANSFER, WAIT, Span, TimelineSummary, rows_of, summary_of

__all__ = ["page_of"]

ROW, GAP = 18, 4
"""Pixels of a lane's row, and between rows."""
MOST_ROWS = 12
"""Of a lane: what overlaps in more is drawn over the last."""
TICKS = 6
KINDS = {
    "train": "training",
    "wait": "training waits",
    "snapshot": "snapshot",
    "transfer": "transfer",
    "queue": "waits for its worker",
    "ok": "evaluation",
    "late": "evaluation, late",
    "failed": "evaluation, failed",
}
"""Classes of bars in timeline.css, and their names in the legend."""


def page_of(tracks: dict[str, list[Span]], *, dropped: int, title: str) -> str:
    """Write the whole document about the tracks of a timeline, whose texts are escaped. `dropped`: spans not kept."""
    spans = [span for track in tracks.values() for span in track]
    begin = min((span.start_s for span in spans), default=0.0)
    end = max((span.end_s for span in spans), default=0.0)
    scale = _Scale(begin, max(end - begin, 1e-9))
    used = {kind_of(span) for span in spans}
    summary = summary_of(tracks)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(verdict(summary))}</p>',
        _kept(dropped),
        tiles(_tiles(summary)),
        "<h2>When</h2>" + _picture(tracks, scale, used) if spans else "<p>Nothing has been recorded.</p>",
        _workers(tracks, summary),
    ]
    style = asset("skyward.training.reporting", "page.css") + asset("skyward.training.evaluation", "timeline.css")
    return document(title, body, style=style, script=asset("skyward.training.evaluation", "timeline.js"))


def kind_of(span: Span) -> str:
    """Which of KINDS it is drawn as."""
    if span.track == TRAINING:
        return "wait" if span.name == WAIT else "train"
    if span.track in (SNAPSHOT, TRANSFER, QUEUE):
        return span.track
    status = span.args.get("status", "failed" if "error" in span.args else "ok")
    return status if status in ("late", "failed") else "ok"


def verdict(summary: TimelineSummary) -> str:
    """What the picture says, in a sentence."""
    if not summary.wall_s:
        return "There is nothing to see yet."
    share = summary.stood_still_s / summary.wall_s
    wall = in_seconds(summary.wall_s)
    still = f"Training stood still for {in_seconds(summary.stood_still_s)} of {wall} ({share:.1%})"
    if not summary.evaluation_s:
        return f"{still}."
    hidden = summary.hidden_s / summary.evaluation_s
    return f"{still}; {hidden:.0%} of {in_seconds(summary.evaluation_s)} of evaluation ran while it trained."


def in_seconds(seconds: float) -> str:
    """As people read it, three digits."""
    if seconds >= 5400:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 90:
        return f"{seconds / 60:.3g} min"
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


class _Scale:
    """Instants as shares of the picture's width."""

    def __init__(self, begin_s: float, length_s: float) -> None:
        self.begin_s, self.length_s = begin_s, length_s

    def __call__(self, seconds: float) -> float:
        return 100 * seconds / self.length_s

    def ticks(self) -> list[float]:
        """Round numbers of seconds since the begin."""
        return round_ticks(0.0, self.length_s, TICKS)


def _picture(tracks: dict[str, list[Span]], scale: _Scale, used: Iterable[str]) -> str:
    names, lanes = [], []
    for name, spans in tracks.items():
        rows = _rows(name, spans)
        height = GAP + len(rows) * (ROW + GAP)
        tall = f"height:{height + 1}px;line-height:{height + 1}px"
        names.append(f'<div class="lane-name" style="{tall}" title="{escape(name)}">{escape(name)}</div>')
        bars = "".join(_bar(span, GAP + at * (ROW + GAP), scale) for at, row in enumerate(rows) for span in row)
        lanes.append(svg([_grid(scale), bars], f'class="lane" height="{height}"', name))
    ticks = "".join(
        f'<text x="{scale(at):.3f}%" y="14"{_anchor(scale(at))}>{in_seconds(at)}</text>' for at in scale.ticks()
    )
    axis = f'<svg class="axis" height="20">{ticks}</svg>'
    shown = {kind: label for kind, label in KINDS.items() if kind in set(used)}
    kinds = legend((f"k-{kind}", label) for kind, label in shown.items())
    zooms = (("0.5", "−", "narrower"), ("2", "+", "wider"))
    buttons = "".join(
        f'<button type="button" data-zoom="{factor}" aria-label="{said}">{sign}</button>'
        for factor, sign, said in zooms
    )
    return (
        f'<div class="card timeline" data-seconds="{scale.length_s!r}"><p class="zoom" hidden>{buttons}</p>'
        f'<div class="lanes"><div class="names">{"".join(names)}</div><div class="scroll"><div class="wide-lanes">'
        f"{''.join(lanes)}{axis}</div></div></div>{kinds}</div>"
    )


def _rows(name: str, spans: list[Span]) -> list[list[Span]]:
    if name == TRAINING:
        # Waits lie within what they interrupt, and are drawn over it.
        return [sorted(spans, key=lambda span: span.name == WAIT)]
    rows = rows_of(spans)
    return [*rows[: MOST_ROWS - 1], [span for row in rows[MOST_ROWS - 1 :] for span in row]][: max(1, len(rows))]


def _bar(span: Span, y: int, scale: _Scale) -> str:
    start = span.start_s - scale.begin_s
    lines = [span.name, f"from {in_seconds(start)}, for {in_seconds(span.duration_s)}"]
    lines += [f"{key}: {_word(value)}" for key, value in span.args.items()]
    title = escape("\n".join(lines))
    wide = f"{scale(span.duration_s):.4f}%"
    # Its outline has a width of its own, so that one of less than a pixel is seen.
    return (
        f'<rect class="k-{kind_of(span)}" x="{scale(start):.4f}%" y="{y}" width="{wide}" height="{ROW}" rx="2">'
        f"<title>{title}</title></rect>"
    )


def _grid(scale: _Scale) -> str:
    return "".join(
        f'<line class="grid" x1="{at:.3f}%" x2="{at:.3f}%" y1="0" y2="100%"/>' for at in map(scale, scale.ticks())
    )


def _anchor(percent: float) -> str:
    return ' class="first"' if percent < 3 else ' class="last"' if percent > 97 else ' class="tick"'


def _tiles(summary: TimelineSummary) -> Iterable[tuple[str, str]]:
    yield "from begin to end", in_seconds(summary.wall_s)
    yield "snapshots", f"{summary.snapshots}: {in_seconds(summary.snapshot_s)}"
    yield "waited for evaluations", in_seconds(summary.waited_s)
    yield "evaluations", f"{summary.evaluations}: {in_seconds(summary.evaluation_s)}"
    if summary.evaluation_s:
        yield "of it beside training", f"{summary.hidden_s / summary.evaluation_s:.0%}"


def _workers(tracks: dict[str, list[Span]], summary: TimelineSummary) -> str:
    rows = []
    for name, busy_s in summary.busy_s.items():
        spans = tracks[name]
        kinds = [kind_of(span) for span in spans]
        counts = (str(len(spans)), str(kinds.count("failed")), str(kinds.count("late")))
        mean = sum(span.duration_s for span in spans) / len(spans)
        rows.append([name, *counts, in_seconds(mean), in_seconds(busy_s), f"{busy_s / (summary.wall_s or 1):.0%}"])
    if not rows:
        return ""
    heads = ("worker", "evaluations", "failed", "late", "mean", "busy", "of the time")
    return f"<h2>Workers</h2>\n{table(heads, rows)}"


def _kept(dropped: int) -> str:
    return f'<p class="problem">{dropped:,} older spans are not kept.</p>' if dropped else ""


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return value if isinstance(value, str) else json.dumps(value)
