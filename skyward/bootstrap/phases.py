"""The parts of a node's way up: each is told as events, and names itself in the error when it fails."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ..errors import BootstrapFailed
from ..events import Emit, PhaseEnded, PhaseFailed, PhaseOutput, PhaseStarted

__all__ = ["Phases"]

_TAIL_LINES = 20


class Phases:
    """Tells of the phases of one node, one after another.

    `mask` is applied to every line that is shown or kept; `host` is how errors call the machine.

    Used by one thread at a time.
    """

    def __init__(self, emit: Emit, node: int, mask: Callable[[str], str], host: str = "") -> None:
        self._emit = emit
        self._node = node
        self._mask = mask
        self._host = host
        self.name = ""
        """Of the open phase; empty: none is."""
        self._began = 0.0
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines that the phase printed."""
        return tuple(self._tail)

    def start(self, name: str, detail: str = "") -> None:
        """Ends the phase before, if one is open."""
        self.end()
        self.name = name
        self._began = time.monotonic()
        self._tail.clear()
        self._emit(PhaseStarted(node=self._node, phase=name, detail=self._mask(detail)))

    def output(self, line: str) -> None:
        text = self._mask(line.rstrip())
        if text:
            self._tail.append(text)
            self._emit(PhaseOutput(node=self._node, phase=self.name, text=text))

    def end(self, *, was_ready: bool = False) -> None:
        if self.name:
            seconds = time.monotonic() - self._began
            self._emit(PhaseEnded(node=self._node, phase=self.name, seconds=seconds, was_ready=was_ready))
            self.name = ""

    def ready(self, name: str) -> None:
        """There was nothing to do."""
        self.start(name)
        self.end(was_ready=True)

    def fail(self, reason: str, advice: str = "") -> BootstrapFailed:
        """The error to raise: what failed where, the last lines that were printed, what to do."""
        name, seconds = self.name or "bootstrap", time.monotonic() - self._began
        reason = self._mask(reason)
        self._emit(PhaseFailed(node=self._node, phase=name, seconds=seconds, reason=reason))
        self.name = ""
        printed = "".join(f"\n    {line}" for line in self._tail)
        where = f" ({self._host})" if self._host else ""
        message = f"node {self._node}{where}: {name} failed after {seconds:.1f} s: {reason}"
        message += f"; the last lines it printed:{printed}" if printed else ""
        message += f"\n{advice}" if advice and printed else f"; {advice}" if advice else ""
        return BootstrapFailed(
            message, node=self._node, phase=name, output=tuple(self._tail), advice=advice, host=self._host
        )
