"""Draw the pictures of README.md and of the documentation into docs/pictures: `make pictures`.

- `run-*.svg`: a terminal, recorded from a real pool (recorded.py), as an animation without scripts.
- `benchmark-*.svg`: the measurements of benchmarks/results, also those where skyward is slower.
- `events.svg`: the events of a training run, in their order.
"""

from __future__ import annotations

import fcntl
import html
import math
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

import pyte

ROOT = Path(__file__).parent.parent.parent
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "benchmarks" / "results" / "2026-11-26_dispatch_2-cores.txt"
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', 'DejaVu Sans Mono', monospace"
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours of one variant of a picture."""

    name: str
    ground: str
    frame: str
    text: str
    faint: str
    ours: str
    slower: str
    faster: str
    terminal: dict[str, str]


LIGHT = Theme(
    name="light",
    ground="#ffffff",
    frame="#d0d7de",
    text="#1f2328",
    faint="#656d76",
    ours="#3f51b5",
    slower="#7986cb",
    faster="#d9730d",
    terminal={
        "black": "#1f2328",
        "red": "#cf222e",
        "green": "#1a7f37",
        "brown": "#9a6700",
        "blue": "#0969da",
        "magenta": "#8250df",
        "cyan": "#1b7c83",
        "white": "#57606a",
    },
)
DARK = Theme(
    name="dark",
    ground="#0d1117",
    frame="#30363d",
    text="#e6edf3",
    faint="#8b949e",
    ours="#8c9eff",
    slower="#5c6bc0",
    faster="#f0883e",
    terminal={
        "black": "#8b949e",
        "red": "#ff7b72",
        "green": "#3fb950",
        "brown": "#d29922",
        "blue": "#58a6ff",
        "magenta": "#bc8cff",
        "cyan": "#39c5cf",
        "white": "#e6edf3",
    },
)

# A run in a terminal ----------------------------------------------------------------------------------------------

COLUMNS, ROWS = 84, 18
_CELL_W, _CELL_H = 8.4, 18
_STEP_S = 0.15
_HOLD_S = 3.0
"""Seconds for which the last picture stays before the animation begins again."""

Run = tuple[str, str, bool, bool]
"""Text, colour, bold, faint."""
Screen = tuple[tuple[Run, ...], ...]


def record() -> list[tuple[float, Screen]]:
    """Run recorded.py on a terminal of its own, and return each picture that it showed, with its time in seconds."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        for name in ("CI", "NO_COLOR"):
            environment.pop(name, None)
        os.execve(sys.executable, [sys.executable, str(Path(__file__).with_name("recorded.py"))], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    pictures: list[tuple[float, Screen]] = []
    began = time.monotonic()
    is_open = True
    while is_open:
        until = time.monotonic() + _STEP_S
        while is_open and (left := until - time.monotonic()) > 0:
            if not select.select([terminal], [], [], left)[0]:
                continue
            try:
                stream.feed(os.read(terminal, 65536))
            except OSError:  # the program has ended
                is_open = False
        picture = tuple(_runs(screen, row) for row in range(ROWS))
        if not pictures or pictures[-1][1] != picture:
            pictures.append((time.monotonic() - began, picture))
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise SystemExit("recorded.py failed")
    return pictures


def _runs(screen: pyte.Screen, row: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    for column in range(COLUMNS):
        cell = screen.buffer[row][column]
        # pyte does not know faint text; skyward's panel uses it for labels only.
        style = (cell.fg, cell.bold, False)
        if runs and runs[-1][1:] == style:
            runs[-1] = (runs[-1][0] + cell.data, *style)
        else:
            runs.append((cell.data, *style))
    while runs and not runs[-1][0].strip():
        runs.pop()
    return tuple(runs)


def run_picture(pictures: list[tuple[float, Screen]], theme: Theme) -> str:
    """Return an SVG that shows each picture for as long as it was on the terminal."""
    width, height = COLUMNS * _CELL_W + 32, ROWS * _CELL_H + 56
    first = pictures[0][0]
    total = pictures[-1][0] - first + _HOLD_S
    rows: dict[tuple[int, tuple[Run, ...]], list[tuple[float, float]]] = {}
    for number, (shown_at, picture) in enumerate(pictures):
        ends_at = pictures[number + 1][0] if number + 1 < len(pictures) else first + total
        for row, runs in enumerate(picture):
            spans = rows.setdefault((row, runs), [])
            if spans and math.isclose(spans[-1][1], shown_at - first):
                spans[-1] = (spans[-1][0], ends_at - first)
            elif runs:
                spans.append((shown_at - first, ends_at - first))
    styles, texts = [], []
    for number, ((row, runs), spans) in enumerate(item for item in rows.items() if item[1]):
        if spans == [(0.0, total)]:
            texts.append(_row(row, runs, theme, ""))
            continue
        styles.append(_keyframes(f"k{number}", spans, total))
        texts.append(_row(row, runs, theme, f' class="r" style="animation-name:k{number}"'))
    # A reader who wants no motion sees the run in its midst, where the panel shows the most.
    still = next(picture for shown_at, picture in pictures if shown_at - first > 0.6 * total)
    last = "".join(_row(row, runs, theme, "") for row, runs in enumerate(still) if runs)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" role="img"
 aria-label="A terminal: three nodes start, share 42 calls and end">
<style>
text {{ font: 14px {FONT}; white-space: pre; }}
.r {{ visibility: hidden; animation: {total:.2f}s step-end infinite; }}
.still {{ display: none; }}
@media (prefers-reduced-motion: reduce) {{ .moving {{ display: none; }} .still {{ display: inline; }} }}
{"".join(styles)}
</style>
<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="8"
 fill="{theme.ground}" stroke="{theme.frame}"/>
<g fill="{theme.frame}"><circle cx="20" cy="18" r="5"/><circle cx="38" cy="18" r="5"/>
<circle cx="56" cy="18" r="5"/></g>
<g class="moving">{"".join(texts)}</g>
<g class="still">{last}</g>
</svg>
"""


def _keyframes(name: str, spans: list[tuple[float, float]], total: float) -> str:
    points = {0.0: "hidden"}
    for begins, ends in spans:
        points[begins / total] = "visible"
        if ends < total:
            points[ends / total] = "hidden"
    steps = " ".join(f"{share:.3%} {{ visibility: {value} }}" for share, value in sorted(points.items()))
    return f"@keyframes {name} {{ {steps} }}\n"


def _row(row: int, runs: tuple[Run, ...], theme: Theme, attributes: str) -> str:
    y = 48 + row * _CELL_H
    parts, column = [], 0
    for text, colour, is_bold, _ in runs:
        fill = theme.text if colour == "default" else theme.terminal.get(colour.removeprefix("bright"), f"#{colour}")
        if not re.fullmatch(r"#[0-9a-f]{6}", fill):
            fill = theme.faint
        bold = ' font-weight="600"' if is_bold else ""
        if text.strip():
            lead = len(text) - len(text.lstrip())
            x = 16 + (column + lead) * _CELL_W
            length = len(text.strip()) * _CELL_W
            content = html.escape(text.strip())
            parts.append(f'<tspan x="{x:.1f}" fill="{fill}" textLength="{length:.1f}"{bold}>{content}</tspan>')
        column += len(text)
    return f'<text y="{y}"{attributes}>{"".join(parts)}</text>'


# The benchmark ----------------------------------------------------------------------------------------------------

MEASURES = {
    "Fresh pool to first result, ms": "fresh pool to first result",
    "No-op of __main__, p50, us": "one call that does nothing",
    "Pipelined no-ops, calls/s": "such calls in a pipeline",
    "Map of 100,000 tiny calls, ms": "map of 100,000 tiny calls",
    "Array of 100 MB in, first time, ms": "100 MB array in",
    "Array of 100 MB in, again, ms": "the same array again",
    "Array of 100 MB out, first time, ms": "100 MB array out",
    "Memory of an idle pool (PSS), MiB": "memory of an idle pool",
}
PEERS = ("ProcessPoolExecutor", "Ray", "Dask")


def measurements() -> dict[str, dict[str, float]]:
    """Return how many times worse than skyward each peer is, by measure and peer; below 1 the peer is better.

    A measure that the file has twice counts as measured last.
    """
    factors: dict[str, dict[str, float]] = {}
    for block in re.split(r"\n\s*\n", RESULTS.read_text()):
        title = block.partition("   (")[0].strip()
        if title not in MEASURES:
            continue
        medians = {}
        for name, median in re.findall(r"^  (\S+(?: \S+)??)(?: \[\w+\])? {2,}([\d.,]+)", block, re.MULTILINE):
            medians[name] = float(median.replace(",", ""))
        is_rate = "higher is better" in block
        ours = medians["skyward Local"]
        factors[title] = {
            peer: ours / medians[peer] if is_rate else medians[peer] / ours for peer in PEERS if peer in medians
        }
    return factors


def benchmark_picture(factors: dict[str, dict[str, float]], theme: Theme) -> str:
    """Return a bar chart on a logarithmic scale: to the right skyward is better, to the left the peer."""
    left, zero, unit, bar, gap = 200, 330, 140, 15, 18
    width = 720
    y = 74
    parts = []
    for title, label in MEASURES.items():
        rows = factors[title]
        height = len(rows) * bar
        parts.append(f'<text class="l" x="{left - 12}" y="{y + height / 2 + 4}" text-anchor="end">{label}</text>')
        for peer, factor in rows.items():
            length = math.log10(factor) * unit
            x, colour = (zero, theme.slower) if factor >= 1 else (zero + length, theme.faster)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(1, abs(length)):.1f}" height="{bar - 3}" fill="{colour}"/>'
            )
            end = zero + max(length, 0) + 6
            times = f"{factor:.0f}x" if factor >= 10 else f"{factor:.1f}x" if factor >= 1 else f"1/{1 / factor:.1f}"
            parts.append(f'<text class="v" x="{end:.1f}" y="{y + 10}">{peer} {times}</text>')
            y += bar
        y += gap
    y -= gap
    height = y + 46
    label = "Bar chart: how many times worse than skyward other executors are, and where they are better"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"
 aria-label="{label}">
<style>text {{ font: 12px {SANS}; fill: {theme.text}; }} .v, .n {{ font-size: 11px; fill: {theme.faint}; }}
.h {{ font-size: 13px; font-weight: 600; }}</style>
<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{theme.ground}" stroke="{theme.frame}"/>
<text class="h" x="24" y="30">Two workers on two cores, medians, relative to skyward</text>
<text x="{zero - 8}" y="54" text-anchor="end" style="fill:{theme.faster}">skyward is slower or larger</text>
<text x="{zero + 8}" y="54" style="fill:{theme.ours}">skyward is faster or smaller: by these factors</text>
{"".join(parts)}
<line x1="{zero}" x2="{zero}" y1="62" y2="{y + 4}" stroke="{theme.ours}" stroke-width="1.5"/>
<text class="n" x="24" y="{height - 16}">Logarithmic scale. A shared virtual machine, 2026-11-26: {RESULTS.name}</text>
</svg>
"""


# The events of a training run -------------------------------------------------------------------------------------

EVENTS = [
    (0, "on_init_end", ""),
    (0, "on_train_begin", ""),
    (1, "on_epoch_begin", "for each epoch"),
    (2, "on_step_begin", "for each step"),
    (3, "on_forward_backward_begin", "for each micro-batch"),
    (3, "on_forward_backward_end", ""),
    (3, "on_substep_end", "not after the step's last one"),
    (2, "on_pre_optimizer_step", "gradients are clipped"),
    (2, "on_optimizer_step", "parameters are changed"),
    (2, "on_train_metrics", "metrics="),
    (2, "on_step_end", "here ranks agree on flags"),
    (2, "on_log_step", "logs= may be added to"),
    (2, "on_log", "logs="),
    (2, "on_prediction_step", "for each batch of an evaluation"),
    (2, "on_evaluate", "metrics="),
    (2, "on_save", "checkpoint=, saved_step="),
    (1, "on_epoch_end", ""),
    (0, "on_train_end", "after on_log with the summary"),
    (0, "on_predict", "ends a predict(): metrics="),
]
_LOOPS = {1: (2, 16, "#5c6bc0"), 2: (3, 15, "#26a69a"), 3: (4, 6, "#f0883e")}
"""By depth: first and last row of the frame, and its colour."""


def events_picture() -> str:
    """Return the events as rows, with a frame around each loop. It follows the reader's light or dark system."""
    row, width = 26, 640
    height = len(EVENTS) * row + 40
    parts = []
    for depth, (first, last, colour) in _LOOPS.items():
        x, y = depth * 30 - 2, 16 + first * row
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width - x - depth * 12}" height="{(last - first + 1) * row}" rx="6" '
            f'fill="{colour}" fill-opacity="0.10" stroke="{colour}" stroke-opacity="0.6"/>'
        )
    for number, (depth, name, note) in enumerate(EVENTS):
        y = 34 + number * row
        parts.append(f'<text class="e" x="{24 + depth * 30}" y="{y}">{name}</text>')
        parts.append(f'<text class="n" x="370" y="{y}">{note}</text>')
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"
 aria-label="The 19 events of a training run, in their order">
<style>.e {{ font: 14px {FONT}; fill: #1f2328; }} .n {{ font: 13px {SANS}; fill: #656d76; }} .g {{ fill: #ffffff; }}
@media (prefers-color-scheme: dark) {{
.e {{ fill: #e6edf3; }} .n {{ fill: #8b949e; }} .g {{ fill: #0d1117; }} }}</style>
<rect class="g" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"
 stroke="#8b949e" stroke-opacity="0.4"/>
{"".join(parts)}
</svg>
"""


def main() -> None:
    """Write all pictures, or those whose names begin with an argument: `pictures.py benchmark`."""
    wanted = tuple(sys.argv[1:]) or ("run", "benchmark", "events")
    PICTURES.mkdir(exist_ok=True)
    if "events" in wanted:
        (PICTURES / "events.svg").write_text(events_picture())
    recording = record() if "run" in wanted else []
    factors = measurements()
    for theme in (LIGHT, DARK):
        if "benchmark" in wanted:
            (PICTURES / f"benchmark-{theme.name}.svg").write_text(benchmark_picture(factors, theme))
        if recording:
            (PICTURES / f"run-{theme.name}.svg").write_text(run_picture(recording, theme))


if __name__ == "__main__":
    main()
