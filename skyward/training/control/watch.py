"""A run as it goes, in a terminal: loss curve, rates, memory and ranks; elsewhere a line for each record of its log."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from ...calls.control import Client, RunStatus
from ...console.words import duration
from ...core.printable import printable, printable_lines
from ...errors import ControlFailed, MissingDependency

__all__ = ["follow_lines", "screen", "watch"]

_HEIGHT = 12
_MAX_POINTS = 2000
"""Of a curve: of more, every n-th is drawn."""
_HIDDEN = ("global_step", "timestamp", "epoch", "total_flos")
_BYTES = re.compile(r"(?:^|_)(?:mem|memory|bytes)(?:_|$)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LATE_S = 60.0
"""Seconds without a step after which that is said."""

Records = list[dict[str, Any]]


def watch(
    client: Client, *, out: TextIO | None = None, every_s: float = 1.0, sleep: Callable[[float], None] = time.sleep
) -> str:
    """Follow a run until it ends; how it stood at last, in words.

    On a terminal it is a screen that changes, elsewhere lines that follow one another. A run that was killed ends it
    too. Ctrl-C ends the watching and leaves the run as it is.

    Raises:
        MissingDependency: on a terminal, without the extra `training`.
        ControlFailed: the run cannot be asked, though it has not ended.
    """
    out = out or sys.stdout
    if out.isatty():
        return _follow_screen(client, out, every_s, sleep)
    return follow_lines(client, out, every_s, sleep)


def follow_lines(client: Client, out: TextIO, every_s: float, sleep: Callable[[float], None]) -> str:
    """`watch` where `out` is no terminal."""

    def show(status: RunStatus, new: Records, records: Records) -> None:
        for record in new:
            out.write(printable_lines(_line(record, status.max_steps)) + "\n")
        out.flush()

    return _follow(client, show, every_s, sleep)


def _follow_screen(client: Client, out: TextIO, every_s: float, sleep: Callable[[float], None]) -> str:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise MissingDependency(_needs(error)) from error
    console = Console(file=out)
    with Live(console=console, auto_refresh=False) as live:

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
            return f"{status.job_id} has ended; it was last seen {_where(status)}"
        records += new
        del records[:-20_000]
        show(status, new, records)
        if status.status == "ended":
            return f"{status.job_id} has ended {_where(status)}"
        sleep(every_s)


# What is shown ------------------------------------------------------------------------------------------------------


def screen(status: RunStatus, records: Records, *, width: int, height: int = 40) -> Any:
    """What a terminal shows of a run, as something that rich prints. Raises: MissingDependency."""
    try:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise MissingDependency(_needs(error)) from error
    inner = max(20, width - 4)
    chart = Text(_chart(records, inner, max(6, min(_HEIGHT, height - 20))), style="cyan")
    rates = Table.grid(padding=(0, 2))
    cells = [printable(f"{name} {_said(name, value)}") for name, value in status.logs.items() if name not in _HIDDEN]
    per_row = max(1, inner // (max((len(cell) for cell in cells), default=1) + 2))
    for at in range(0, len(cells), per_row):
        rates.add_row(*cells[at : at + per_row])
    ranks = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "host", "process", "step", "memory", "said"):
        ranks.add_column(name, justify="left" if name == "host" else "right")
    for rank in status.ranks:
        ranks.add_row(*_rank_cells(rank, status.timestamp))
    title = Text.assemble((printable(status.job_id), "bold"), "  ", (_state(status), _style(status)))
    return Panel(Group(Text(_where(status)), chart, rates, Text(), ranks), title=title, title_align="left")


def _chart(records: Records, width: int, height: int) -> str:
    """The losses against the steps: the training's, and the evaluation's where there is one."""
    curves = {name: _points(records, name) for name in ("loss", "eval_loss")}
    curves = {name: points for name, points in curves.items() if points[0]}
    if not curves:
        return "no loss was logged yet"
    try:
        import plotext
    except ImportError as error:
        raise MissingDependency(_needs(error)) from error
    figure = plotext.figure
    figure.clear()
    for name, (steps, values) in curves.items():
        signal = figure.signal(steps, values, marker="braille" if name == "loss" else "o")
        signal.lines(name == "loss")
        figure.draw(signal)
    figure.plot_size(width, height)
    drawn = _COLOURS.sub("", str(figure.build())).rstrip("\n")
    return f"{drawn}\n{', '.join(_last(name, points[1]) for name, points in curves.items())}"


def _last(name: str, values: Sequence[float]) -> str:
    return f"{name} {values[-1]:.4g} (o)" if name == "eval_loss" else f"{name} {values[-1]:.4g}"


def _points(records: Records, name: str) -> tuple[list[int], list[float]]:
    found = [(r["global_step"], r[name]) for r in records if isinstance(r.get(name), int | float)]
    found = found[:: len(found) // _MAX_POINTS + 1]
    return [int(step) for step, _ in found], [float(value) for _, value in found]


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
    values = "  ".join(f"{name} {_said(name, value)}" for name, value in record.items() if name not in _HIDDEN)
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


def _said(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
            return "/".join(_said(name, item) for item in value)
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


def _needs(error: ImportError) -> str:
    return f"the live view of a terminal needs `pip install skyward[training]`: {error}; without: `... | cat`"
