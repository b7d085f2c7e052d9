"""A pool in plain lines: its start, each phase once all nodes are through it, ready, what fails, its end."""

from __future__ import annotations

from .. import events as told
from ..core.printable import printable
from .state import PoolState
from .words import duration, fitted, usd

__all__ = ["PlainLines"]


_LONGEST_REASON = 200
"""Columns of a reason."""


class PlainLines:
    """Lines for a log file or a pipe. `is_quiet`: only what goes wrong, for pools that start in a moment."""

    def __init__(self, name: str, *, is_quiet: bool) -> None:
        self._state = PoolState(name)
        self._is_quiet = is_quiet
        self._retried: set[int] = set()
        """Nodes of which a retry was told."""
        self._ended: dict[str, dict[int, told.PhaseEnded]] = {}

    def take(self, event: told.Event) -> list[str]:
        """What there is to say of it."""
        self._state.take(event)
        text = self._failure(event) or ("" if self._is_quiet else self._progress(event))
        return [printable(f"{self._state.name}: {text}")] if text else []

    def _failure(self, event: told.Event) -> str:
        match event:
            case told.PhaseFailed():
                what = f"{event.phase} failed after {duration(event.seconds)}"
                # The error that is raised, or told later, has all of it.
                return f"node {event.node}: {what}: {fitted(printable(event.reason), _LONGEST_REASON)}"
            case told.NodeLost():
                why = f": {event.reason}" if event.reason else ""
                then = "; another one is being made" if event.will_be_replaced else "; nothing takes its place"
                return f"node {event.node} was lost{why}{then}"
            case told.NodeReplaced():
                return f"node {event.node} was replaced after {duration(event.seconds)}"
            case told.PreemptionNotice() | told.LinkLost() | told.LinkRestored():
                return f"node {event.node}: {_trouble(event)}"
            case told.Overlooked():
                return printable(event.text)
            case told.BudgetWarning():
                return (
                    f"{usd(event.spent_usd)} of the budget of {usd(event.budget_usd)} are spent; "
                    f"the pool is closed in {duration(event.seconds_left)}"
                )
            case told.PoolClosed() if event.reason:
                return self._early_end(event)
        return ""

    def _early_end(self, event: told.PoolClosed) -> str:
        if self._state.ready_s is not None:
            return f"closed after {duration(event.seconds)}: {event.reason}"
        # A start that fails raises; saying why twice helps nobody.
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
                return f"ready after {duration(event.seconds)}: {_nodes(len(self._state.nodes))}{cost}"
            case told.PoolClosed():
                spent = self._state.spent_usd(event.at)
                cost = f", cost {usd(spent)} by the prices of its offers" if spent else ""
                return f"closed after {duration(event.seconds)}{cost}"
        return ""

    def _is_news(self, event: told.PhaseOutput) -> bool:
        """Whether it is the first retry of a host of the user's own; a rented machine that boots always needs some."""
        node = self._state.nodes[event.node]
        is_first = event.node not in self._retried
        self._retried.add(event.node)
        return is_first and not node.instance_type

    def _phase(self, event: told.PhaseEnded) -> str:
        """One line for all nodes: sixty-four of them would else say six times sixty-four."""
        ended = self._ended.setdefault(event.phase, {})
        ended[event.node] = event
        if len(ended) < len(self._state.nodes):
            return ""
        del self._ended[event.phase]
        if all(one.was_ready for one in ended.values()):
            return f"{event.phase}: there already"
        slowest = max(ended.values(), key=lambda one: one.seconds)
        which = f" (node {slowest.node}, the slowest)" if len(ended) > 1 else ""
        return f"{event.phase}: {duration(slowest.seconds)}{which}"


def _trouble(event: told.PreemptionNotice | told.LinkLost | told.LinkRestored) -> str:
    if isinstance(event, told.PreemptionNotice):
        return "its provider takes the machine back soon; nothing new is sent there"
    if isinstance(event, told.LinkRestored):
        return f"the connection stands again after {duration(event.seconds)}"
    why = f" ({event.reason})" if event.reason else ""
    return f"the connection is cut{why}; it is being made again"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
