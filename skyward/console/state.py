"""State of a pool, derived from its events: its nodes, its phases, its cost. Pure: times come with events and calls."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from .. import events as told
from ..core.records import dataclass
from .words import calls_summary, duration, usd

State = Literal["waiting", "coming", "ready", "cut", "failed", "lost", "gone"]


@dataclass
class NodeState:
    """State of one node. "coming": it is on its way up; "cut": it is reconnecting."""

    state: State = "waiting"
    phase: str = ""
    detail: str = ""
    since: float = 0.0
    """Start of this state or phase."""
    took_s: float = 0.0
    """Seconds until it was ready, from the start of the pool or the loss of its predecessor."""
    instance_type: str = ""
    address: str = ""
    devices: str = ""
    """Accelerators that its calls share."""
    usage: told.NodeUsage | None = None
    began: float = 0.0
    phases: list[tuple[str, float]] = field(default_factory=list)
    """Phases that are over, with their seconds. Phases with nothing to do are left out."""


@dataclass
class PoolState:
    """State of a pool after some events. Times are seconds since the epoch, as in the events."""

    name: str
    provider: str = ""
    nodes: dict[int, NodeState] = field(default_factory=dict)
    began: float = 0.0
    ready_s: float | None = None
    is_closed: bool = False
    calls: int = 0
    failed: int = 0
    budget_usd: float | None = None
    _running: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Machines that may cost money: since when, and USD per hour."""
    _ended_usd: float = 0.0
    _cost: told.CostUpdated | None = None

    def take(self, event: told.Event) -> None:  # noqa: C901, PLR0912, PLR0915  # a table
        node = self._node(event)
        match event:
            case told.PoolStarted():
                self.provider, self.began = event.provider, event.at
                self.ready_s, self.is_closed = None, False
                self.nodes = {n: NodeState(since=event.at, began=event.at) for n in range(event.nodes)}
            case told.PoolReady():
                self.ready_s = event.seconds
            case told.PoolScaled():
                for number in event.removed:
                    self.nodes.pop(number, None)
            case told.PoolClosed():
                self.is_closed = True
                self.calls, self.failed = event.calls, event.failed
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
                node.phase, node.detail, node.address, node.devices = "", "", event.address, event.devices
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
                self._cost = event
            case told.BudgetWarning():
                self.budget_usd = event.budget_usd

    def _node(self, event: told.Event) -> NodeState:
        number = getattr(event, "node", None)
        if isinstance(event, told.InstanceTerminated):  # of a node that was given back, which is not to appear again
            return self.nodes.get(event.node, NodeState())
        return NodeState() if number is None else self.nodes.setdefault(number, NodeState(since=event.at))

    def _change(
        self, node: NodeState, state: Literal["coming", "ready", "cut", "failed", "lost"], at: told.Event
    ) -> None:
        node.state, node.since = state, at.at

    @property
    def devices(self) -> str:
        """Accelerators of each node; empty if the nodes differ, or have none."""
        kinds = {node.devices for node in self.nodes.values()}
        return kinds.pop() if len(kinds) == 1 else ""

    @property
    def is_one_machine(self) -> bool:
        """Return whether all nodes are on this machine, so that one load is the load of all."""
        return self.provider == "local"

    @property
    def machine_usage(self) -> told.NodeUsage | None:
        """The latest load of the one machine; None for nodes with machines of their own."""
        usages = [node.usage for node in self.nodes.values() if node.usage is not None] if self.is_one_machine else []
        return max(usages, key=lambda usage: usage.at, default=None)

    @property
    def ready(self) -> int:
        """Number of nodes that answer."""
        return sum(node.state == "ready" for node in self.nodes.values())

    @property
    def price_usd_per_hour(self) -> float:
        """Present price of all machines that the provider has launched and not terminated."""
        if self._cost is not None and not self.is_closed:
            return self._cost.price_usd_per_hour
        return sum(price for _, price in self._running.values())

    def spent_usd(self, now: float) -> float:
        """Cost so far, by the prices of the offers."""
        cost = self._cost
        if cost is not None:
            return cost.spent_usd + (0 if self.is_closed else cost.price_usd_per_hour * max(0, now - cost.at) / 3600)
        return self._ended_usd + sum(price * (now - since) / 3600 for since, price in self._running.values())


def closing_words(pool: PoolState, now: float) -> str:
    """Sum up a pool that has closed: its time, its calls, its cost."""
    spent = pool.spent_usd(now)
    parts = [calls_summary(pool.calls, pool.failed), f"cost {usd(spent)} by the prices of its offers" if spent else ""]
    sums = ", ".join(filter(None, parts))
    return f"closed after {duration(now - pool.began)}" + (f": {sums}" if sums else "")
