"""Nodes that come and go while a pool is open: they join when they are wanted, and rest when nobody uses them.

To the scheduler, a resting node is a lost one that will return: calls that can go to it only wait for it. Nothing runs
on a node when it is given back, so no call is lost with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..errors import PoolClosed, UsageError
from ..schedule.scaling import Demand
from ..values.machine import Machine
from ..wire.channel import ChannelClosed
from ..wire.frames import FrameKind
from .direct_lines import DirectLines
from .kept_values import KeptValues
from .ledger import Ledger
from .link import NodeLink
from .nodes import NodeLinks
from .task_dispatcher import TaskDispatcher
from .threads import run_side_by_side

_READ_S = 0.2
"""Longest wait in seconds until a link to an idle node was read."""
_FINISH_S = 3.0
"""Seconds for the last frames to a remote node."""


class Membership:
    """Nodes of an engine that are there, and those that rest. Thread-safe.

    Args:
        ledger: Shared state of the engine.
        lines: Direct lines, which are dropped with their node.
        dispatcher: Carries out the decisions of the scheduler.
        nodes: Links to all nodes.
        values: Values that stay on nodes.
        on_left: Functions that get the number of each node that was given back, under the ledger's lock.
    """

    def __init__(
        self,
        ledger: Ledger,
        lines: DirectLines,
        dispatcher: TaskDispatcher,
        nodes: NodeLinks,
        values: KeptValues,
        *,
        on_left: Sequence[Callable[[int], object]],
    ) -> None:
        self._ledger = ledger
        self._lines = lines
        self._dispatcher = dispatcher
        self._nodes = nodes
        self._values = values
        self._on_left = on_left
        self._leaving: set[int] = set()
        self.last = frozenset[int]()
        """Nodes that others depend on: none, because the scheduler is here."""
        self.keeps: Callable[[int], bool] = lambda node: (
            bool(ledger.links[node].held) or any(actor.node == node for actor in ledger.actors.values())
        )
        """Tells whether something of the user's lives on a node beyond its calls. Such a node is in use."""

    @property
    def there(self) -> tuple[int, ...]:
        """Nodes that take calls, or are being replaced, in order."""
        with self._ledger.lock:
            known = self._ledger.scheduler.demand(self._ledger.resting).known
            return tuple(sorted(known - self._ledger.resting - self._leaving))

    @property
    def is_idle(self) -> bool:
        """Return whether there is no open call, and no node keeps anything."""
        ledger = self._ledger
        with ledger.lock:
            return not (ledger.tasks or ledger.gangs or ledger.actors) and not any(map(self.keeps, ledger.links))

    def demand(self) -> Demand:
        with self._ledger:
            return self._ledger.scheduler.demand(self._ledger.resting)

    def expect(self, nodes: Iterable[int], slots: int, *, then: Callable[[], object] = lambda: None) -> None:
        """Register nodes that are not there yet. Calls may name them, and then wait for them.

        Args:
            nodes: Nodes that may come. One that is there, or is being replaced, stays as it is.
            slots: Slots of each.
            then: Called under the ledger's lock.
        """
        with self._ledger:
            known = self._ledger.scheduler.demand(self._ledger.resting).known
            for node in set(nodes) - known:
                self._ledger.resting.add(node)
                self._ledger.scheduler.node_absent(node, slots)
            then()

    def join(self, machines: Sequence[Machine], *, then: Callable[[], object] = lambda: None) -> None:
        """Connect to the agents of resting nodes and use them: all of them, or none and raise.

        Args:
            machines: Their machines. Nodes that are there already, or are being replaced, stay as they are: a client
                asks again if it does not know whether an earlier process has heard it.
            then: Called under the ledger's lock before they are used. If it raises, they are not.

        Raises:
            Unreachable: An agent does not answer.
            UsageError: They cannot be noted.
            PoolClosed: The engine was closed meanwhile.
        """
        links: dict[int, NodeLink] = {}
        errors: list[Exception] = []
        machines = self._absent(machines)
        run_side_by_side(partial(self._open, machine, links, errors) for machine in machines)
        ledger = self._ledger
        with ledger:
            if not errors and ledger.is_open:
                ledger.links.update(links)
                for machine in machines:
                    ledger.machines[machine.node] = machine
                    ledger.resting.discard(machine.node)
                try:
                    then()
                except UsageError as error:
                    errors.append(error)
                    for machine in machines:
                        del ledger.links[machine.node], ledger.machines[machine.node]
                        ledger.resting.add(machine.node)
            if errors or not ledger.is_open:
                ledger.after += [link.close for link in links.values()]
            else:
                for machine in machines:
                    self._nodes.up(machine)
                self._nodes.tell_all()
        if errors:
            raise errors[0]
        if not ledger.is_open:
            raise PoolClosed("pool: closed while nodes were added; open a new one")
        ledger.watcher.wake()

    def _absent(self, machines: Sequence[Machine]) -> list[Machine]:
        """Return the machines of those nodes that nobody uses or replaces."""
        with self._ledger:
            known = self._ledger.scheduler.demand(self._ledger.resting).known
            return [each for each in machines if each.node in self._ledger.resting or each.node not in known]

    def _open(self, machine: Machine, links: dict[int, NodeLink], errors: list[Exception]) -> None:
        try:
            links[machine.node] = self._nodes.opener.open(machine)
        except Exception as error:  # `join` raises it
            errors.append(error)

    @property
    def leaving(self) -> frozenset[int]:
        """Nodes that get no new calls, because they will be given back."""
        with self._ledger.lock:
            return frozenset(self._leaving)

    def leave(self, node: int) -> None:
        """Send a node no new calls, so that it can be given back when those that run there have ended."""
        ledger = self._ledger
        with ledger:
            if node in ledger.links and node not in self._leaving and not ledger.scheduler.is_wanted(node):
                self._leaving.add(node)
                self._dispatcher.perform(ledger.scheduler.node_leaving(node))

    def stay(self, count: int) -> int:
        """Keep nodes that are leaving: those that waiting calls name, and the first others.

        Args:
            count: Nodes that are wanted; may be negative.

        Returns:
            Number of nodes that stay.
        """
        ledger = self._ledger
        with ledger:
            named = [node for node in self._leaving if ledger.scheduler.is_wanted(node)]
            others = sorted(self._leaving.difference(named))[: max(0, count - len(named))]
            for node in (*named, *others):
                self._leaving.discard(node)
                link = ledger.links.get(node)
                if link is not None and not link.has_notice:
                    self._dispatcher.perform(ledger.scheduler.node_staying(node))
        return len(named) + len(others)

    def node_lost(self, node: int) -> None:
        """Forget that a lost node was leaving, because its replacement takes calls. Called under the ledger's lock."""
        self._leaving.discard(node)

    def move_values(self, node: int) -> bool:
        """Move the values that stay on a node to others, so that it can go. Call it until it returns False.

        They go to nodes with lower numbers, because those are given back later. Those of a node that goes for certain
        go to any other one. Without such a node they stay.

        Returns:
            Whether it has values that another node can take.
        """
        ledger = self._ledger
        with ledger:
            if not (ledger.is_open and node in ledger.links):
                return False
            noticed = {other for other, link in ledger.links.items() if link.has_notice}
            staying = sorted(ledger.links.keys() - self._leaving - noticed)
            others = [other for other in staying if other < node or node not in staying]
            self._values.move(node, others)
            return bool(others and ledger.links[node].held)

    def may_go(self, node: int) -> bool:
        """Return whether a node is not in use."""
        with self._ledger.lock:
            link = self._ledger.links.get(node)
            return link is not None and self._may_go(link)

    def give_back(self, node: int, confirm: Callable[[], object] = lambda: None) -> bool:
        """Stop using a node, and let its agent end. Returns False, and changes nothing, if the node is in use.

        Args:
            node: The node.
            confirm: Called when nothing can begin there anymore, and before the agent ends. Returns once whoever goes
                on after this process has all outcomes of the node. If it raises, the agent is not told to end.
        """
        link = self._ledger.links.get(node)
        if link is None:
            return False

        def finish() -> None:
            confirm()
            link.send(FrameKind.SHUTDOWN)

        return self.part_with(link, partial(self._may_go, link), partial(self._let_rest, link), finish)

    def part_with(
        self, link: NodeLink, may_go: Callable[[], bool], take_out: Callable[[], object], finish: Callable[[], object]
    ) -> bool:
        """Part with a node that is well. Returns False, and changes nothing, if it may not go.

        Args:
            link: Link to the node.
            may_go: Tells whether it may. Called under the ledger's lock.
            take_out: Takes it out of the books, under the ledger's lock. Nothing is read from it anymore.
            finish: Called without the lock, when nothing can begin there anymore, and before the link is closed.
        """
        # Nobody may be reading the link when it is closed here, or its end would look like the loss of the node.
        if not link.reading.acquire(timeout=_READ_S):
            return False
        try:
            with self._ledger:
                if not may_go():
                    return False
                self._lines.drop(link)
                self._nodes.unwatch(link)
                take_out()
            try:
                finish()
            finally:
                self._close(link)
            return True
        finally:
            link.reading.release()

    def _let_rest(self, link: NodeLink) -> None:
        """Take a node out of the books until it is wanted again: no call goes there."""
        ledger, node = self._ledger, link.node
        del ledger.links[node], ledger.machines[node]
        ledger.resting.add(node)
        self._leaving.discard(node)
        self._dispatcher.perform(ledger.scheduler.node_lost(node, will_return=True))
        for on_left in self._on_left:
            on_left(node)
        self._nodes.tell_all()

    def _close(self, link: NodeLink) -> None:
        if link.dialler is not None:
            link.finish(time.monotonic() + _FINISH_S)
            return
        with self._ledger:  # as in `link_repair`: the descriptor's number may be reused
            with contextlib.suppress(ChannelClosed):
                link.flush()
            link.close()

    def _may_go(self, link: NodeLink) -> bool:
        ledger, node = self._ledger, link.node
        return (
            ledger.is_open
            and ledger.links.get(node) is link
            and link.channel.is_attached
            and ledger.scheduler.is_idle(node)
            and not ledger.scheduler.is_wanted(node)
            and not self.keeps(node)
        )

    def refuse_resting(self, slots: int) -> None:
        """Fail the waiting calls that only resting nodes could run, because there are none to be had."""
        ledger = self._ledger
        with ledger:
            for node in sorted(ledger.scheduler.demand(ledger.resting).named):
                self._dispatcher.perform(ledger.scheduler.node_lost(node, will_return=False))
                ledger.scheduler.node_absent(node, slots)
