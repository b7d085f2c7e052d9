"""View of a running server: on a terminal a screen with its curves, elsewhere a line for each change."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TextIO

from ...console.chart import Curve, Row, chart
from ...console.rich_parts import rich_parts
from ...console.words import fitted, size_of
from ...core.printable import printable
from .client import DiLoCoClient
from .facts import KEPT_ROUNDS
from .report import WORKER_COLUMNS, agreement, number, round_line, server_line, worker_cells
from .transport import ServerUnreachable

PATIENCE_S = 60.0
"""Time for a server that does not answer to be started again, in seconds."""
_HEIGHT = 14
_MOST_CURVES = 6
"""Most workers with a curve each. More would hide one another."""
_COLOURS = ("green", "yellow", "magenta", "blue", "red", "bright_black")
_MEAN = "cyan"
_FIRST = ("worker", "state", "loss", "steps/s", "heard", "cosine", "up", "down", "steps", "H", "stale")
"""Columns of a worker, the most important ones first. A narrow terminal shows only some."""
_COLUMN = 9
"""Usual width of one."""
_RIGHT = ("steps", "steps/s", "H", "loss", "cosine", "stale", "up", "down")

Facts = dict[str, Any]


class _View(Protocol):
    """Output of a watcher."""

    def show(self, status: Facts, new: list[Facts], rounds: list[Facts]) -> None:
        """Show a state, and the rounds that were closed since the one before."""

    def tell(self, text: str) -> None:
        """Show a message about the server itself."""


def watch(
    client: DiLoCoClient,
    *,
    out: TextIO | None = None,
    every_s: float = 1.0,
    patience_s: float = PATIENCE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Follow a server until it ends, and return its last state in words.

    A terminal shows a screen that changes; other outputs get a line for each change. A server that does not answer may
    be started again. Ctrl-C ends the watching; the server goes on.

    Args:
        client: Requests to the server.
        out: Stream to write to; None: sys.stdout.
        every_s: Seconds between two requests, > 0.
        patience_s: Seconds without an answer after which the server counts as ended.
        sleep: Function that waits.

    Raises:
        MissingDependency: On a terminal, without the extra `training`.
        ServerUnreachable: The server has not answered once.
        UsageError: The token is wrong.
    """
    out = out or sys.stdout
    is_terminal = out.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")
    with _screen(client.name, out) if is_terminal else _lines(client.name, out) as view:
        return _follow(client, view, every_s, patience_s, sleep)


def _follow(
    client: DiLoCoClient, view: _View, every_s: float, patience_s: float, sleep: Callable[[float], None]
) -> str:
    history = _History()
    status: Facts | None = None
    silent_s = 0.0
    while True:
        try:
            status = client.ask("/status")
            new = history.fetch(client)
            if silent_s:
                view.tell("answers again")
            silent_s = 0.0
        except ServerUnreachable as error:
            if status is None:
                raise
            if silent_s >= patience_s:
                return f"{client.name} has ended; it was last seen at {server_line(status)}"
            if not silent_s:
                view.tell(str(error).removeprefix(f"{client.name} "))
            silent_s += every_s
        else:
            view.show(status, new, history.rounds)
        sleep(every_s)


class _History:
    """Closed rounds of a server, also over its restarts."""

    def __init__(self) -> None:
        self.rounds: list[Facts] = []
        self._id = self._state = ""

    def fetch(self, client: DiLoCoClient) -> list[Facts]:
        """Return the rounds that are new.

        A server that was killed may have gone back to an older save. One that has no save begins another training.
        """
        answer = client.ask(f"/history?first={self.rounds[-1]['round'] + 1 if self.rounds else 0}")
        if answer["id"] != self._id:
            answer = client.ask("/history")
            is_same = answer["state"] == self._state
            self.rounds = [facts for facts in self.rounds if is_same and facts["round"] < answer["began_in"]]
            self._id, self._state = answer["id"], answer["state"]
        new: list[Facts] = answer["rounds"]
        self.rounds = [*self.rounds, *new][-KEPT_ROUNDS:]
        return new


# Lines ----------------------------------------------------------------------------------------------------------------


class _Lines:
    """A line for each change."""

    def __init__(self, name: str, out: TextIO) -> None:
        self._name, self._out = name, out
        self._workers: set[str] | None = None
        self._problem = ""

    def show(self, status: Facts, new: list[Facts], rounds: list[Facts]) -> None:
        workers = {worker["worker"] for worker in status["workers"]}
        if self._workers is None:
            self.tell(server_line(status))
            self._workers = workers
        for worker in sorted(workers - self._workers):
            self._write(f"worker {worker} joined")
        for facts in new:
            self._write(round_line(facts))
        for worker in sorted(self._workers - workers):
            self._write(f"worker {worker} left")
        if status["save_error"] != self._problem:
            self._write(status["save_error"] or "saves work again")
        self._workers, self._problem = workers, status["save_error"]

    def tell(self, text: str) -> None:
        self._write(f"{self._name}: {text}")

    def _write(self, text: str) -> None:
        self._out.write(printable(text) + "\n")
        self._out.flush()


@contextmanager
def _lines(name: str, out: TextIO) -> Iterator[_View]:
    yield _Lines(name, out)


# Screen ---------------------------------------------------------------------------------------------------------------


class _Screen:
    """A picture that is drawn again for each change."""

    def __init__(self, name: str, live: Any) -> None:
        self._name, self._live = name, live

    def show(self, status: Facts, new: list[Facts], rounds: list[Facts]) -> None:
        console = self._live.console
        self._live.update(screen(self._name, status, rounds, width=console.width, height=console.height), refresh=True)

    def tell(self, text: str) -> None:
        self._live.console.print(printable(f"{self._name}: {text}"), markup=False, highlight=False)


@contextmanager
def _screen(name: str, out: TextIO) -> Iterator[_View]:
    rich = rich_parts()
    with rich.Live(console=rich.Console(file=out), auto_refresh=False) as live:
        yield _Screen(name, live)


def screen(name: str, status: Facts, rounds: list[Facts], *, width: int, height: int = 40) -> Any:
    """Return the picture of a server, as something that rich prints.

    Raises:
        MissingDependency: Without the extra `training`.
    """
    rich = rich_parts()
    Text = rich.Text
    inner = max(20, width - 4)
    workers = rich.Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    shown = [title for title in WORKER_COLUMNS if title in _FIRST[: max(3, inner // _COLUMN)]]
    for title in shown:
        workers.add_column(title, justify="right" if title in _RIGHT else "left", no_wrap=True)
    for worker in status["workers"]:
        cells = dict(zip(WORKER_COLUMNS, worker_cells(worker), strict=True))
        workers.add_row(*(Text(printable(cells[title])) for title in shown))
    space = height - len(status["workers"]) - 7
    parts: list[Any] = [
        Text(fitted(f"{server_line(status)}, {_traffic(status)}", inner)),
        Text(printable(fitted(round_line(status["last"]), inner)) if status["last"] else "", style="dim"),
        *(Text.assemble(*row) for row in _curves(rounds, inner, max(6, min(_HEIGHT, space)))),
        Text(),
        workers if status["workers"] else Text("no worker is present", style="dim"),
    ]
    if status["save_error"]:
        parts.append(Text(printable(status["save_error"]), style="red"))
    colour = "red" if status["save_error"] else "green" if status["workers"] else "yellow"
    return rich.Panel(
        rich.Group(*parts), title=Text(printable(name), style="bold"), title_align="left", border_style=colour
    )


def _traffic(status: Facts) -> str:
    return f"{size_of(status['received_bytes'])} received, {size_of(status['sent_bytes'])} sent"


def _curves(rounds: list[Facts], width: int, height: int) -> list[Row]:
    """Draw the losses, of the mean and of few workers, or else the norm of the outer gradient."""
    named = [("loss", _MEAN, _points(rounds, lambda facts: facts["loss"]))]
    workers = sorted({worker for facts in rounds for worker in facts["workers"]})
    if not named[0][2]:
        named = [
            ("outer gradient", _MEAN, _points(rounds, lambda facts: facts["gradient_norm"])),
            ("cosine", "magenta", _points(rounds, agreement)),
        ]
    elif len(workers) <= _MOST_CURVES:
        for worker, colour in zip(workers, _COLOURS, strict=False):
            named.insert(0, (worker, colour, _points(rounds, partial(_loss_of, worker=worker))))
    curves = [
        Curve(xs=[x for x, _ in points], ys=[y for _, y in points], colour=colour)
        for _, colour, points in named
        if points
    ]
    if not curves:
        return [[("no round was closed yet", "dim")]]
    legend = Row()
    for title, colour, points in reversed(named):
        if points:
            legend += [("━ ", colour), (f"{printable(title)} {number(points[-1][1])}   ", "")]
    return [*chart(curves, width, height - 1, unit="round"), legend]


def _loss_of(facts: Facts, worker: str) -> float | None:
    part = facts["workers"].get(worker)
    return None if part is None else part["loss"]


def _points(rounds: list[Facts], value: Callable[[Facts], float | None]) -> list[tuple[int, float]]:
    pairs = [(facts["round"], value(facts)) for facts in rounds]
    return [(x, y) for x, y in pairs if y is not None]
