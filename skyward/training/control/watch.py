"""View of a running training: on a terminal a screen with its curves, elsewhere a line for each record of its log."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TextIO

from ...calls.control import Client, RunStatus
from ...console.chart import Curve, Row, chart
from ...console.rich_parts import rich_parts
from ...console.words import columns, duration, fitted
from ...core.printable import printable, printable_lines
from ...errors import ControlFailed

_HEIGHT = 12
_MAX_POINTS = 2000
"""Points of a curve at most; of more, every n-th is drawn."""
_HIDDEN = ("global_step", "timestamp", "epoch", "total_flos")
_BYTES = re.compile(r"(?:^|_)(?:mem|memory|bytes|rss|vram)(?:_|$)")
_LOSS, _EVAL_LOSS = "cyan", "magenta"
_BAR = 30
_RECENT = 20
"""Records of the log that tell how fast the run goes now."""
_LATE_S = 60.0
"""Seconds without a step after which the title says so."""

Records = list[dict[str, Any]]


def watch(
    client: Client, *, out: TextIO | None = None, every_s: float = 1.0, sleep: Callable[[float], None] = time.sleep
) -> str:
    """Follow a run until it ends, and return its last state in words.

    A terminal shows a screen that changes; other outputs get a line for each record. A run that was killed counts as
    ended. Ctrl-C ends the watching; the run continues.

    Args:
        client: of the run.
        out: stream to write to; None for sys.stdout.
        every_s: seconds between two requests, > 0.
        sleep: waits that long.

    Raises:
        MissingDependency: on a terminal, without the extra `training`.
        ControlFailed: the run has not ended, but does not answer.
    """
    out = out or sys.stdout
    if out.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb"):
        return _follow_screen(client, out, every_s, sleep)
    return follow_lines(client, out, every_s, sleep)


def follow_lines(client: Client, out: TextIO, every_s: float, sleep: Callable[[float], None]) -> str:
    """Follow a run on an output that is not a terminal."""

    def show(status: RunStatus, new: Records, records: Records) -> None:
        for record in new:
            out.write(printable_lines(_line(record, status.max_steps)) + "\n")
        out.flush()

    return _follow(client, show, every_s, sleep)


def _follow_screen(client: Client, out: TextIO, every_s: float, sleep: Callable[[float], None]) -> str:
    rich = rich_parts()
    console = rich.Console(file=out)
    with rich.Live(console=console, auto_refresh=False) as live:

        def show(status: RunStatus, new: Records, records: Records) -> None:
            live.update(screen(status, records, width=console.width, height=console.height), refresh=True)

        return _follow(client, show, every_s, sleep)


def _follow(
    client: Client,
    show: Callable[[RunStatus, Records, Records], None],
    every_s: float,
    sleep: Callable[[float], None],
) -> str:
    records: Records = []
    following = 0
    status: RunStatus | None = None
    while True:
        try:
            status = client.status()
            new: Records = []
            while True:
                part, after = client.history(following)
                new += part
                if after == following:
                    break
                following = after
        except ControlFailed as error:
            if not error.is_gone or status is None:
                raise
            # Its process is gone, so nobody can be asked; the records may be newer than the last status.
            step = max(status.global_step, int(records[-1]["global_step"]) if records else 0)
            status = replace(status, status="ended", global_step=step)
            show(status, [], records)
            is_done = 0 < status.max_steps <= step
            return f"{status.job_id} has ended{'' if is_done else '; it was last seen'} {_where(status)}"
        records += new
        del records[:-20_000]
        show(status, new, records)
        if status.status == "ended":
            return f"{status.job_id} has ended {_where(status)}"
        sleep(every_s)


# Screen -------------------------------------------------------------------------------------------------------------


def screen(status: RunStatus, records: Records, *, width: int, height: int = 40) -> Any:
    """Return the picture of a run, as something that rich prints.

    Raises:
        MissingDependency: without the extra `training`.
    """
    rich = rich_parts()
    Text = rich.Text
    inner = max(20, width - 4)
    ranks = rich.Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "host", "process", "step", "memory", "heard"):
        ranks.add_column(name, justify="left" if name == "host" else "right")
    for rank in status.ranks:
        ranks.add_row(*_rank_cells(rank, status.timestamp))
    values = _values(status, inner)
    taken = len(values) + len(status.ranks) + 9
    title = Text.assemble((printable(status.job_id), "bold"), "  ", (_state(status), _style(status)))
    parts: list[Any] = [
        Text.assemble(*_bar(status, inner), overflow="ellipsis", no_wrap=True),
        Text(fitted(_times(status, records), inner), style="dim"),
        *(Text.assemble(*row) for row in _chart(records, inner, max(6, min(_HEIGHT, height - taken)))),
        Text(),
        *(Text(line) for line in values),
        Text(),
        ranks,
    ]
    return rich.Panel(rich.Group(*parts), title=title, title_align="left", border_style=_style(status))


def _bar(status: RunStatus, width: int) -> list[tuple[str, str]]:
    """Return where the run is: its step, and a bar if its length is known."""
    epoch = f"  epoch {status.epoch:.2f}" if status.epoch is not None else ""
    if status.max_steps <= 0:
        return [(f"step {status.global_step:,}{epoch}", "")]
    text = f"step {status.global_step:,} of {status.max_steps:,}{epoch}"
    part = min(1.0, status.global_step / status.max_steps)
    size = min(_BAR, width - len(text) - 8)
    if size < 6:
        return [(f"{text}  {part:.0%}", "")]
    full = round(part * size)
    return [(f"{text}  ", ""), ("━" * full, _LOSS), ("─" * (size - full), "dim"), (f" {part:.0%}", "")]


def _times(status: RunStatus, records: Records) -> str:
    """Return how fast the run goes, for how long it has run, and when it will be done."""
    timed = [(float(r["timestamp"]), int(r["global_step"])) for r in records if _is_number(r.get("timestamp"))]
    if not timed:
        return "no step was logged yet"
    parts = []
    began = timed[0][0]
    recent = timed[-_RECENT:]
    seconds, steps = recent[-1][0] - recent[0][0], recent[-1][1] - recent[0][1]
    per_s = steps / seconds if seconds > 0 else 0.0
    if per_s:
        parts.append(f"{per_s:.3g} steps/s" if per_s >= 1 else f"{1 / per_s:.3g} s/step")
    parts.append(f"{duration(max(0.0, status.timestamp - began))} so far" if status.status != "ended" else "")
    if status.status == "ended":
        parts[-1] = f"ended after {duration(max(0.0, timed[-1][0] - began))}"
    elif per_s and status.max_steps > status.global_step:
        parts.append(f"{duration((status.max_steps - status.global_step) / per_s)} left")
    return " · ".join(parts)


def _chart(records: Records, width: int, height: int) -> list[Row]:
    """Draw the losses against the steps: the training's as a line, the evaluations' as marks."""
    curves, legend = [], Row()
    for name, colour, mark in (("loss", _LOSS, "━"), ("eval_loss", _EVAL_LOSS, "●")):
        steps, values = _points(records, name)
        if not steps:
            continue
        curves.append(Curve(xs=steps, ys=values, colour=colour, is_line=name == "loss"))
        legend += [(f"{mark} ", colour), (f"{name} {values[-1]:.4g}   ", "")]
        if name == "eval_loss":
            legend.append((f"best {min(values):.4g}", "dim"))
    if not curves:
        return [[("no loss was logged yet", "dim")]]
    return [*chart(curves, width, height - 1), legend]


def _points(records: Records, name: str) -> tuple[list[int], list[float]]:
    points = [(r["global_step"], r[name]) for r in records if _is_number(r.get(name))]
    points = points[:: len(points) // _MAX_POINTS + 1]
    return [int(step) for step, _ in points], [float(value) for _, value in points]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _values(status: RunStatus, width: int) -> list[str]:
    """Return the latest log in columns, without the losses that the chart names."""
    in_chart = {name for name in ("loss", "eval_loss") if _is_number(status.logs.get(name))}
    shown = [(name, value) for name, value in status.logs.items() if name not in {*_HIDDEN, *in_chart}]
    cells = [printable(f"{name} {_in_units(name, value)}") for name, value in shown]
    size = max((columns(cell) for cell in cells), default=0) + 3
    per_row = max(1, width // size)
    lines = []
    for at in range(0, len(cells), per_row):
        row = "".join(cell + " " * (size - columns(cell)) for cell in cells[at : at + per_row])
        lines.append(fitted(row.rstrip(), width))
    return lines


def _rank_cells(rank: dict[str, Any], now: float) -> tuple[str, ...]:
    memory = rank.get("memory_bytes")
    return (
        str(rank.get("rank")),
        str(rank.get("host")),
        str(rank.get("pid")),
        str(rank.get("global_step")),
        "-" if memory is None else _bytes(memory),
        f"{duration(max(0.0, now - float(rank.get('at') or now)))} ago",
    )


def _line(record: dict[str, Any], max_steps: int) -> str:
    values = "  ".join(f"{name} {_in_units(name, value)}" for name, value in record.items() if name not in _HIDDEN)
    of = f"/{max_steps}" if max_steps > 0 else ""
    epoch = record.get("epoch")
    return f"step {record.get('global_step')}{of}  {f'epoch {epoch:.2f}  ' if isinstance(epoch, float) else ''}{values}"


def _where(status: RunStatus) -> str:
    of = f" of {status.max_steps}" if status.max_steps > 0 else ""
    epoch = f", epoch {status.epoch:.2f}" if status.epoch is not None else ""
    return f"at step {status.global_step}{of}{epoch}"


def _state(status: RunStatus) -> str:
    quiet_s = status.timestamp - status.step_at
    if status.status != "ended" and status.step_at and quiet_s > _LATE_S:
        return f"{status.status}, no step for {duration(quiet_s)}"
    return status.status


def _style(status: RunStatus) -> str:
    return {"running": "green", "ended": "dim"}.get(status.status, "yellow")


def _in_units(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
            return "/".join(_in_units(name, item) for item in value)
        return str(value)
    if _BYTES.search(name) or name == "peak_mem_allocated":
        return _bytes(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
