"""Timeline as an HTML page: a lane for training, snapshots, transfers and each worker, with totals and warnings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

from ..reporting.document import asset, document, legend, round_ticks, svg, table, tiles
from .spans import QUEUE, SNAPSHOT, TRAINING, TRANSFER, WAIT, Span, TimelineSummary, rows_of, summary_of

ROW, GAP = 18, 4
"""Pixels of a lane's row, and of the gap between rows."""
MOST_ROWS = 12
"""Most rows of a lane; further overlapping spans are drawn over the last row."""
TICKS = 6
STEPS_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 18000, 36000, 86400, 172800)
"""Distances between ticks of the time axis, in seconds; the script has the same."""
KINDS = {
    "train": "training",
    "wait": "training waits for an evaluation",
    "snapshot": "training copies its weights",
    "transfer": "weights on their way",
    "queue": "evaluation waits for a worker",
    "ok": "evaluation",
    "late": "evaluation, too late",
    "failed": "evaluation, failed",
}
"""Classes of bars in timeline.css, and their names in the legend."""
LANES = {TRAINING: "training", SNAPSHOT: "weights copied", TRANSFER: "weights sent", QUEUE: "in the queue"}
"""Labels of the lanes that are not workers."""
IDLE_FROM = 0.75
"""Share of the evaluation time from which a worker counts as idle."""
LOCAL = ("in-process", "subprocess")
"""Beginnings of the names of workers on the training machine; while idle they cost nothing."""
LABEL_PX, LANE_PX = 6.5, 850
"""Width of a character of a bar's label, and of a lane, as assumed until the script measures them."""


def page_of(tracks: dict[str, list[Span]], *, dropped: int, title: str) -> str:
    """Return the document of a timeline, with all texts escaped; `dropped` is the number of spans no longer kept."""
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
        *(f'<p class="warning">{escape(warning)}</p>' for warning in warnings_of(tracks, summary)),
        tiles(_tiles(summary)),
        "<h2>When</h2>" + _picture(tracks, scale, used, summary) if spans else "<p>Nothing has been recorded.</p>",
        _workers(tracks, summary),
    ]
    style = asset("skyward.training.reporting", "page.css") + asset("skyward.training.evaluation", "timeline.css")
    return document(title, body, style=style, script=asset("skyward.training.evaluation", "timeline.js"))


def kind_of(span: Span) -> str:
    """Return the kind in KINDS that a span is drawn as."""
    if span.track == TRAINING:
        return "wait" if span.name == WAIT else "train"
    if span.track in (SNAPSHOT, TRANSFER, QUEUE):
        return span.track
    status = span.args.get("status", "failed" if "error" in span.args else "ok")
    return status if status in ("late", "failed") else "ok"


def verdict(summary: TimelineSummary) -> str:
    """Summarize the timeline in a sentence."""
    if not summary.wall_s:
        return "There is nothing to see yet."
    share = summary.stood_still_s / summary.wall_s
    wall = in_seconds(summary.wall_s)
    still = f"Training stood still for {in_seconds(summary.stood_still_s)} of {wall} ({share:.1%})"
    if not summary.evaluation_s:
        return f"{still}."
    hidden = summary.hidden_s / summary.evaluation_s
    return f"{still}; {hidden:.0%} of {in_seconds(summary.evaluation_s)} of evaluation ran while it trained."


def idle_share(name: str, tracks: dict[str, list[Span]], summary: TimelineSummary) -> float:
    """Return the share of the time in which a worker had no evaluation, between the first and the last of all."""
    evaluations = [span for worker in summary.busy_s for span in tracks[worker]]
    window_s = max(span.end_s for span in evaluations) - min(span.start_s for span in evaluations)
    return 1 - summary.busy_s[name] / window_s if window_s > 0 else 0.0


def warnings_of(tracks: dict[str, list[Span]], summary: TimelineSummary) -> Iterable[str]:
    """Yield a sentence for each idle worker, with what to do about it."""
    for name in summary.busy_s:
        share = idle_share(name, tracks, summary)
        if share >= IDLE_FROM and not name.startswith(LOCAL):
            count = len(tracks[name])
            yield (
                f"{name} was idle {share:.0%} of the time, with {count} evaluation{'s' if count > 1 else ''}. "
                "Use fewer workers, or evaluate more often."
            )


def in_seconds(seconds: float) -> str:
    """Return a duration for people, with three digits."""
    if seconds >= 5400:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 90:
        return f"{seconds / 60:.3g} min"
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


class _Scale:
    """Map from seconds to percent of the picture's width."""

    def __init__(self, begin_s: float, length_s: float) -> None:
        self.begin_s, self.length_s = begin_s, length_s

    def __call__(self, seconds: float) -> float:
        return 100 * seconds / self.length_s

    def ticks(self) -> list[float]:
        """Return seconds since the begin that are round numbers in their unit: seconds, minutes or hours."""
        step = next((step for step in STEPS_S if step * TICKS >= self.length_s), None)
        if self.length_s < STEPS_S[0] or step is None:  # fractions of a second, or weeks
            return round_ticks(0.0, self.length_s, TICKS)
        return [at * float(step) for at in range(int(self.length_s / step) + 1)]


def _picture(tracks: dict[str, list[Span]], scale: _Scale, used: Iterable[str], summary: TimelineSummary) -> str:
    names, lanes = [], []
    for name, spans in tracks.items():
        rows = _rows(name, spans)
        height = GAP + len(rows) * (ROW + GAP)
        tall = f"height:{height + 1}px;line-height:{height + 1}px"
        names.append(_lane_name(name, tall, tracks, summary))
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
        f'<button type="button" data-zoom="{factor}" aria-label="{label}">{sign}</button>'
        for factor, sign, label in zooms
    )
    return (
        f'<div class="card timeline" data-seconds="{scale.length_s!r}"><p class="zoom" hidden>{buttons}</p>'
        f'<div class="lanes"><div class="names">{"".join(names)}</div><div class="scroll"><div class="wide-lanes">'
        f"{''.join(lanes)}{axis}</div></div></div>{kinds}</div>"
    )


def _lane_name(name: str, style: str, tracks: dict[str, list[Span]], summary: TimelineSummary) -> str:
    label, note, kind = LANES.get(name, name), "", "lane-name"
    if name in summary.busy_s:
        share = idle_share(name, tracks, summary)
        note = f" <small>{1 - share:.0%} busy</small>"
        kind += " idle" if share >= IDLE_FROM and not name.startswith(LOCAL) else ""
    return f'<div class="{kind}" style="{style}" title="{escape(label)}">{escape(label)}{note}</div>'


def _rows(name: str, spans: list[Span]) -> list[list[Span]]:
    if name == TRAINING:
        # A wait interrupts a span of training, so it is drawn over it.
        return [sorted(spans, key=lambda span: span.name == WAIT)]
    rows = rows_of(spans)
    return [*rows[: MOST_ROWS - 1], [span for row in rows[MOST_ROWS - 1 :] for span in row]][: max(1, len(rows))]


def _bar(span: Span, y: int, scale: _Scale) -> str:
    start = span.start_s - scale.begin_s
    lines = [span.name, f"from {in_seconds(start)}, for {in_seconds(span.duration_s)}"]
    lines += [f"{key}: {_text(value)}" for key, value in span.args.items()]
    title = escape("\n".join(lines))
    wide = f"{scale(span.duration_s):.4f}%"
    room = (scale(span.duration_s) / 100 * LANE_PX - 10) / LABEL_PX
    # The last word is the step, which is worth more than no label.
    text = next((text for text in (span.name, span.name.rpartition(" ")[2]) if len(text) <= room), "")
    label = f'<text class="bar" x="{scale(start):.4f}%" dx="5" y="{y + 13}">{escape(text)}</text>' if text else ""
    # The outline of a bar has a fixed width, so that a bar of less than a pixel is visible.
    return (
        f'<rect class="k-{kind_of(span)}" x="{scale(start):.4f}%" y="{y}" width="{wide}" height="{ROW}" rx="2">'
        f"<title>{title}</title></rect>{label}"
    )


def _grid(scale: _Scale) -> str:
    return "".join(
        f'<line class="grid" x1="{at:.3f}%" x2="{at:.3f}%" y1="0" y2="100%"/>' for at in map(scale, scale.ticks())
    )


def _anchor(percent: float) -> str:
    return ' class="first"' if percent < 3 else ' class="last"' if percent > 97 else ' class="tick"'


def _tiles(summary: TimelineSummary) -> Iterable[tuple[str, str]]:
    yield "time in all", in_seconds(summary.wall_s)
    yield "copies of the weights", f"{summary.snapshots} in {in_seconds(summary.snapshot_s)}"
    yield "training waited", in_seconds(summary.waited_s)
    yield "evaluations", f"{summary.evaluations} in {in_seconds(summary.evaluation_s)}"
    if summary.evaluation_s:
        yield "of them beside training", f"{summary.hidden_s / summary.evaluation_s:.0%}"


def _workers(tracks: dict[str, list[Span]], summary: TimelineSummary) -> str:
    rows = []
    for name, busy_s in summary.busy_s.items():
        spans = tracks[name]
        kinds = [kind_of(span) for span in spans]
        counts = (str(len(spans)), str(kinds.count("failed")), str(kinds.count("late")))
        mean = sum(span.duration_s for span in spans) / len(spans)
        idle = f"{idle_share(name, tracks, summary):.0%}"
        rows.append([name, *counts, in_seconds(mean), in_seconds(busy_s), idle])
    if not rows:
        return ""
    heads = ("worker", "evaluations", "failed", "late", "mean", "busy", "idle")
    return f"<h2>Workers</h2>\n{table(heads, rows)}"


def _kept(dropped: int) -> str:
    return f'<p class="problem">{dropped:,} older spans are no longer kept.</p>' if dropped else ""


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return value if isinstance(value, str) else json.dumps(value)
