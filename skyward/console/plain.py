"""Plain lines about a pool: its start, each phase that all nodes are through, problems, its end."""

from __future__ import annotations

import threading

from .. import events as told
from ..core.printable import printable
from .outlet import notices, notify
from .state import PoolState, closing_words
from .words import duration, fitted, usd

_LONGEST_REASON = 200
"""Columns of a reason at most."""


class PlainLines:
    """Lines for a log file or a pipe. `is_quiet` leaves only problems, for pools that start in a moment."""

    def __init__(self, name: str, *, is_quiet: bool) -> None:
        self._state = PoolState(name)
        self._is_quiet = is_quiet
        self._retried: set[int] = set()
        """Nodes whose first retry was reported."""
        self._ended: dict[str, dict[int, told.PhaseEnded]] = {}

    def take(self, event: told.Event) -> list[str]:
        """Return the lines for an event."""
        self._state.take(event)
        text = self._failure(event) or self._scaling(event) or self._engine(event)
        if not text and not self._is_quiet:
            text = self._progress(event)
        return [printable(f"{self._state.name}: {text}")] if text else []

    def _failure(self, event: told.Event) -> str:
        match event:
            case told.PhaseFailed():
                what = f"{event.phase} failed after {duration(event.seconds)}"
                # The error that is raised later has the whole reason.
                return f"node {event.node}: {what}: {fitted(printable(event.reason), _LONGEST_REASON)}"
            case told.NodeLost():
                why = f": {event.reason}" if event.reason else ""
                then = "; a replacement is on its way" if event.will_be_replaced else "; it is not replaced"
                return f"node {event.node} was lost{why}{then}"
            case told.NodeReplaced():
                return f"node {event.node} was replaced after {duration(event.seconds)}"
            case told.PreemptionNotice() | told.LinkLost() | told.LinkRestored():
                return f"node {event.node}: {_trouble(event)}"
            case told.Overlooked():
                return printable(event.text)
            case told.BudgetWarning() | told.DetachmentWarning():
                return _warning(event)
            case told.PoolClosed() if event.reason:
                return self._early_end(event)
        return ""

    def _scaling(self, event: told.Event) -> str:
        if isinstance(event, told.PoolScaled) and not self._is_quiet:
            return f"{_scaled(event)}: {event.reason}"
        if isinstance(event, told.ScalingFailed):
            have = f"continues with {_nodes(event.nodes)}" if event.nodes else "has no nodes"
            return f"wanted {_nodes(event.wanted)}, {have}: {fitted(printable(event.reason), _LONGEST_REASON)}"
        return ""

    def _engine(self, event: told.Event) -> str:
        if isinstance(event, told.EngineUp) and not self._is_quiet:
            return f"{event.engine.capitalize()} carries the calls between nodes, after {duration(event.seconds)}"
        if isinstance(event, told.EngineLost):
            why = fitted(printable(event.reason), _LONGEST_REASON)
            return f"{event.engine.capitalize()} is not there, so this program carries the calls: {why}"
        return ""

    def _early_end(self, event: told.PoolClosed) -> str:
        if self._state.ready_s is not None:
            return f"closed after {duration(event.seconds)}: {event.reason}"
        # A start that fails raises its reason, so it is left out here.
        return "" if self._is_quiet else f"did not start, closed after {duration(event.seconds)}"

    def _progress(self, event: told.Event) -> str:
        match event:
            case told.PoolStarted():
                return f"starting {_nodes(event.nodes)} on {event.provider}"
            case told.InstanceLaunched():
                kind = f"{event.instance_type}{' (spot)' if event.is_spot else ''}"
                return f"node {event.node}: {kind} {event.instance}, {usd(event.price_usd_per_hour)} per hour"
            case told.PhaseOutput() if event.phase == "connect" and self._is_news(event):
                return f"node {event.node}: {fitted(printable(event.text), _LONGEST_REASON)}"
            case told.PhaseEnded():
                return self._phase(event)
            case told.PoolReady():
                price = self._state.price_usd_per_hour
                cost = f", {usd(price)} per hour" if price else ""
                devices = f" with {printable(self._state.devices)}" if self._state.devices else ""
                return f"ready after {duration(event.seconds)}: {_nodes(len(self._state.nodes))}{devices}{cost}"
            case told.PoolClosed():
                return closing_words(self._state, event.at)
        return ""

    def _is_news(self, event: told.PhaseOutput) -> bool:
        """Return whether this is the first retry of a host of the user. A rented machine retries while it boots."""
        node = self._state.nodes[event.node]
        is_first = event.node not in self._retried
        self._retried.add(event.node)
        return is_first and not node.instance_type

    def _phase(self, event: told.PhaseEnded) -> str:
        """Return one line for all nodes. Sixty-four nodes with six phases would otherwise fill the log."""
        ended = self._ended.setdefault(event.phase, {})
        ended[event.node] = event
        if len(ended) < len(self._state.nodes):
            return ""
        del self._ended[event.phase]
        if all(one.was_ready for one in ended.values()):
            return f"{event.phase}: already there"
        slowest = max(ended.values(), key=lambda one: one.seconds)
        which = f" (node {slowest.node}, the slowest)" if len(ended) > 1 else ""
        return f"{event.phase}: {duration(slowest.seconds)}{which}"


def _warning(event: told.BudgetWarning | told.DetachmentWarning) -> str:
    left = duration(event.seconds_left)
    if isinstance(event, told.DetachmentWarning) and event.is_budget:
        return f"no program was there, and the pool was {left} from the end that its budget sets"
    if isinstance(event, told.DetachmentWarning):
        return f"no program was there for long, and the pool was {left} from its end; pool.extend() gives it more time"
    return f"{usd(event.spent_usd)} of the budget of {usd(event.budget_usd)} are spent; the pool closes in {left}"


def _trouble(event: told.PreemptionNotice | told.LinkLost | told.LinkRestored) -> str:
    if isinstance(event, told.PreemptionNotice):
        return "its provider will take the machine back soon; it gets no further calls"
    if isinstance(event, told.LinkRestored):
        return f"reconnected after {duration(event.seconds)}"
    why = f" ({event.reason})" if event.reason else ""
    return f"connection lost{why}; reconnecting"


def _scaled(event: told.PoolScaled) -> str:
    if not event.nodes:
        return f"rests without nodes, {event.before} -> 0, until the next call"
    verb = "gives nodes back" if event.removed else "grows" if event.before else "gets nodes"
    return f"{verb}, {event.before} -> {_nodes(event.nodes)}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


class PlainView:
    """Plain lines on standard error."""

    wants_usage = False

    def __init__(self, name: str, *, is_quiet: bool) -> None:
        self._lines = PlainLines(name, is_quiet=is_quiet)
        self._lock = threading.Lock()

    def emit(self, event: told.Event) -> None:
        with self._lock:
            for line in self._lines.take(event):
                notify(line)

    def shows_progress(self) -> bool:
        return False

    def settle(self) -> None:
        return

    def close(self) -> None:
        notices.flush()
