"""A pool as its events tell it: what each node does, what it costs. Pure: time is given with the events and asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .. import events as told

__all__ = ["NodeState", "PoolState"]


State = Literal["waiting", "coming", "ready", "cut", "failed", "lost", "gone"]


@dataclass
class NodeState:
    """`state`: "coming": on its way up; "cut": its connection is being made again."""

    state: State = "waiting"
    phase: str = ""
    detail: str = ""
    since: float = 0.0
    """When this state, or phase, began."""
    took_s: float = 0.0
    """From the pool's start, or the loss of its forerunner, until it was ready."""
    instance_type: str = ""
    address: str = ""
    usage: told.NodeUsage | None = None
    began: float = 0.0
    phases: list[tuple[str, float]] = field(default_factory=list)
    """That it is through, with their seconds; those in which there was nothing to do are left out."""


@dataclass
class PoolState:
    """Made of events, in their order. Times are those of the events: seconds since the epoch."""

    name: str
    provider: str = ""
    nodes: dict[int, NodeState] = field(default_factory=dict)
    began: float = 0.0
    ready_s: float | None = None
    is_closed: bool = False
    budget_usd: float | None = None
    _running: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of each machine that may cost money: since when, USD per hour."""
    _ended_usd: float = 0.0
    _said_cost: told.CostUpdated | None = None

    def take(self, event: told.Event) -> None:  # noqa: C901, PLR0912, PLR0915  # a table
        node = self._node(event)
        match event:
            case told.PoolStarted():
                self.provider, self.began = event.provider, event.at
                self.ready_s, self.is_closed = None, False
                self.nodes = {n: NodeState(since=event.at, began=event.at) for n in range(event.nodes)}
            case told.PoolReady():
                self.ready_s = event.seconds
            case told.PoolClosed():
                self.is_closed = True
            case told.InstanceLaunched():
                node.instance_type = event.instance_type
                self._running[event.instance] = (event.at, event.price_usd_per_hour)
            case told.InstanceTerminated():
                since, price = self._running.pop(event.instance, (event.at, 0.0))
                self._ended_usd += price * (event.at - since) / 3600
                if node.state in ("ready", "coming", "waiting"):
                    node.state, node.since = "gone", event.at
            case told.PhaseStarted():
                self._change(node, "coming", event)
                node.phase, node.detail = event.phase, event.detail
            case told.PhaseOutput():
                node.detail = event.text
            case told.PhaseEnded():
                node.detail = ""
                if not event.was_ready:
                    node.phases.append((event.phase, event.seconds))
            case told.PhaseFailed():
                self._change(node, "failed", event)
                node.phase, node.detail = event.phase, event.reason
                node.took_s = event.seconds
            case told.NodeReady():
                self._change(node, "ready", event)
                node.phase, node.detail, node.address = "", "", event.address
                node.took_s = event.at - node.began
            case told.PreemptionNotice():
                node.detail = "will be taken back"
            case told.LinkLost():
                self._change(node, "cut", event)
                node.detail = event.reason
            case told.LinkRestored():
                self._change(node, "ready", event)
                node.detail = ""
            case told.NodeLost():
                self._change(node, "lost", event)
                node.phase, node.detail, node.usage, node.began = "", event.reason, None, event.at
                node.phases.clear()
            case told.NodeUsage():
                node.usage = event
            case told.CostUpdated():
                self._said_cost = event
            case told.BudgetWarning():
                self.budget_usd = event.budget_usd

    def _node(self, event: told.Event) -> NodeState:
        number = getattr(event, "node", None)
        return NodeState() if number is None else self.nodes.setdefault(number, NodeState(since=event.at))

    def _change(
        self, node: NodeState, state: Literal["coming", "ready", "cut", "failed", "lost"], at: told.Event
    ) -> None:
        node.state, node.since = state, at.at

    @property
    def ready(self) -> int:
        """How many nodes answer."""
        return sum(node.state == "ready" for node in self.nodes.values())

    @property
    def price_usd_per_hour(self) -> float:
        """Now, of all machines that the provider has made and not ended."""
        if self._said_cost is not None and not self.is_closed:
            return self._said_cost.price_usd_per_hour
        return sum(price for _, price in self._running.values())

    def spent_usd(self, now: float) -> float:
        """So far, by the prices of the offers."""
        cost = self._said_cost
        if cost is not None:
            return cost.spent_usd + (0 if self.is_closed else cost.price_usd_per_hour * max(0, now - cost.at) / 3600)
        return self._ended_usd + sum(price * (now - since) / 3600 for since, price in self._running.values())
