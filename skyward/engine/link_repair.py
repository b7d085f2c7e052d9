"""Recovery from broken links and lost nodes: a link is redialled, a node is replaced by another machine.

States of a node's link, all changed under the ledger's lock:

- up: in `ledger.links`, attached and watched.
- broken: in `ledger.links`, detached. One thread (`_reconnect`) redials it, and the scheduler sends it nothing new.
- lost: no longer in `ledger.links`. One thread (`_replace`) gets another machine.

The threads work for seconds without the lock. Meanwhile the pool may close or the node may be lost another way. So
each one checks under the lock that `ledger.links` still has its link before it changes anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from ..errors import InternalError, NodeError, SkywardError, Unreachable
from ..values.machine import PREEMPTED, Gone, Machine, Machines
from ..wire.ends import Ends
from .direct_lines import DirectLines
from .gang import RankTask
from .ledger import Ledger
from .link import NodeLink
from .link_times import LINK_TIMES
from .nodes import NodeLinks
from .task_dispatcher import TaskDispatcher
from .task_events import TaskEvents
from .tasks import Task, loss_error
from .threads import in_words, start_thread

_log = logging.getLogger(__name__)

_REPLACEMENT_TRIES = 3
"""Attempts to replace a lost node by a reachable machine."""


class LinkRepair:
    """Repair of broken links, and replacement of lost nodes.

    Args:
        ledger: Shared state of the engine.
        lines: Direct lines, which are dropped with their node.
        dispatcher: Carries out the decisions of the scheduler.
        nodes: Links to all nodes.
        task_events: Gets the events of links and nodes.
        on_lost: Functions that get the number of each lost node, after its tasks are handled, under the ledger's lock.
    """

    def __init__(
        self,
        ledger: Ledger,
        lines: DirectLines,
        dispatcher: TaskDispatcher,
        nodes: NodeLinks,
        task_events: TaskEvents,
        *,
        on_lost: Sequence[Callable[[int], object]],
    ) -> None:
        self._ledger = ledger
        self._lines = lines
        self._dispatcher = dispatcher
        self._nodes = nodes
        self._task_events = task_events
        self._on_lost = on_lost
        self.source: Machines | None = None
        """Source of replacements for lost machines; None: there are none."""
        self._replacing: set[int] = set()
        """Nodes for which another machine is looked for."""
        self.may_ask: Callable[[int], bool] = lambda node: True
        """Returns whether the source can replace a node now. That of a detached pool is a client, which may be away."""

    # Lost links -----------------------------------------------------------------------------------------------------

    def link_gone(self, link: NodeLink, why: str) -> None:
        """Handle the end of a link: a local node is lost with it, a remote link is redialled."""
        if link.dialler is None:
            self._node_gone(link, Gone(reason=why))
            return
        self._redial(link, why)

    def move(self, node: int) -> None:
        """Dial the link to a node again, because there is another way to it. Nobody is told of a lost link."""
        with self._ledger:
            link = self._ledger.links.get(node)
        if link is not None and link.dialler is not None:
            self._redial(link, "")

    def _redial(self, link: NodeLink, why: str) -> None:
        """Detach a link and dial it again.

        Args:
            link: A link with a dialler.
            why: Why it is lost; empty if it is not.
        """
        with self._ledger:
            # Several threads may see the end of one link. The first detaches it, and the others find it detached.
            if not self._ledger.is_open or not link.channel.is_attached:
                return
            self._nodes.unwatch(link)
            ends = link.channel.release()  # closed by the thread: it waits for the command to die
            if why:
                self._task_events.link_lost(link.node, why)
            self._dispatcher.perform(self._ledger.scheduler.node_paused(link.node))
        start_thread(
            lambda: self._reconnect(link, ends, was_lost=bool(why)),
            name="skyward-reconnect",
            failed=lambda error: self._node_gone(
                link, Gone(reason=f"its link could not be restored: {in_words(error)}")
            ),
        )

    def _reconnect(self, link: NodeLink, ends: Ends | None, *, was_lost: bool) -> None:
        """Redial the agent, in a separate thread, until its lease must have expired. Then the node is lost."""
        from .dialler import Forgotten  # nodes on this machine do without

        assert link.dialler is not None
        if ends is not None:
            ends.close()
        # Nobody renews the lease over a broken link, so after this time the watchdog has ended the node for certain.
        # Giving up earlier could run a call twice: here again, and there to its end.
        deadline = link.channel.heard_at + self._ledger.machines[link.node].lease_s + LINK_TIMES.margin_s
        try:
            new_ends, facts = link.dialler.dial_until(deadline, LINK_TIMES, lambda: self._why_gone(link.node))
        except Forgotten as error:
            self._node_gone(link, error.gone or Gone(reason=str(error)))
            return
        except (NodeError, InternalError) as error:
            self._node_gone(link, Gone(reason=str(error)))
            return
        with self._ledger:
            if not self._ledger.is_open or self._ledger.links.get(link.node) is not link:
                self._ledger.after.append(new_ends.close)
                return
            link.dialler.channel.attach(new_ends, facts["received"])
            link.follow()
            link.may_widen = bool(facts.get("can_stripe"))
            self._nodes.watch(link)
            if was_lost:
                self._task_events.link_restored(link.node)
            self._dispatcher.perform(self._ledger.scheduler.node_resumed(link.node))
        self._ledger.watcher.wake()

    def _why_gone(self, node: int) -> Gone | None:
        try:
            return self.source.why_gone(node) if self.source is not None and self.may_ask(node) else None
        except SkywardError:  # the provider does not answer, which says nothing about the machine
            return None

    # Lost nodes -----------------------------------------------------------------------------------------------------

    def _node_gone(self, link: NodeLink, gone: Gone) -> None:
        with self._ledger:
            self._lines.drop(link)
            self._nodes.unwatch(link)
            if link.dialler is None:
                # Close under the lock. Otherwise another thread could write to the descriptor's number after the
                # kernel has reused it.
                link.close()
            else:
                self._ledger.after.append(link.close)
            # It may have been given back, or found lost before.
            is_there = self._ledger.is_open and self._ledger.links.get(link.node) is link
            will_return = is_there and self.strike_out(link, gone)
        if will_return:
            self.begin_to_replace(link.node)

    def strike_out(self, link: NodeLink, gone: Gone) -> bool:
        """Strike a node out of the books, whose link nobody reads anymore. Return whether it can be replaced now.

        Needs the ledger's lock.
        """
        node = link.node
        del self._ledger.links[node]
        self._ledger.taken_back.discard(node)
        if gone.is_preempted:
            self._ledger.taken_back.add(node)
        will_return = self.source is not None and self.may_ask(node)
        self._task_events.node_lost(node, will_return=will_return, reason=gone.reason)
        for task in list(self._ledger.tasks.values()):
            self._lose(task, node)
        # After `_lose`: the scheduler retries what it still knows, and needs the losses to judge.
        self._dispatcher.perform(self._ledger.scheduler.node_lost(node, will_return=will_return))
        for on_lost in self._on_lost:
            on_lost(node)
        return will_return

    def missing(self, machine: Machine) -> None:
        """Note that a node which an earlier head had does not answer, and replace it. Needs the ledger's lock."""
        node, will_return = machine.node, self.source is not None and self.may_ask(machine.node)
        reason = PREEMPTED.reason if node in self._ledger.taken_back else "its agent does not answer"
        self._task_events.node_lost(node, will_return=will_return, reason=reason)
        if will_return:
            self._ledger.scheduler.node_absent(node, machine.slots)
            self._ledger.after.append(lambda: self.begin_to_replace(node))

    def replace_lost(self, nodes: Iterable[int]) -> None:
        """Replace nodes that were given up, because somebody can now. Needs the ledger's lock."""
        for node in nodes:
            machine = self._ledger.machines.get(node)
            if machine is None or node in self._ledger.links or node in self._replacing or not self.may_ask(node):
                continue
            self._ledger.scheduler.node_absent(node, machine.slots)
            self.begin_to_replace(node)

    def begin_to_replace(self, node: int) -> None:
        """Get another machine for a node that was struck out, in a separate thread."""
        self._replacing.add(node)
        start_thread(
            lambda: self._replace(node),
            name="skyward-replace",
            failed=lambda error: self.not_replaced(node, error),
        )

    def _lose(self, task: Task, node: int) -> None:
        """Fail a task of a lost node that cannot be retried. Otherwise note its loss for the scheduler's decision."""
        if isinstance(task, RankTask):
            if task.node == node:
                self._dispatcher.forget(task)
                loss = self._ledger.node_loss(node, started=True)
                self._ledger.after.append(lambda: task.on_lost(loss))
            return
        if self._ledger.scheduler.node_of(task.id) != node:
            return
        loss = self._ledger.node_loss(node, started=None)
        if task.is_cancelled or task.handles_loss or not task.may_move:
            self._dispatcher.forget(task)
            self._ledger.scheduler.drop(task.id)
            if task.handles_loss:
                self._ledger.after.append(lambda: task.on_lost(loss))
            elif not task.is_cancelled:
                error = loss_error(loss, task.name)
                self._ledger.after.append(lambda: task.on_failed(error))
        else:
            self._ledger.losses[task.id] = loss

    def _replace(self, node: int) -> None:
        """Get another machine for a node, in a separate thread, or give up on the node."""
        assert self.source is not None
        machine: Machine | None = None
        link: NodeLink | None = None
        try:
            for tries_left in range(_REPLACEMENT_TRIES - 1, -1, -1):
                machine = self.source.replace(node)
                if machine is None or not self._ledger.is_open:
                    break
                try:
                    link = self._nodes.opener.open(machine)
                    break
                except Unreachable:
                    if not tries_left:
                        raise
        except Exception as error:  # calls of the node fail with NodeLost, so the log must say why there is no other
            self._give_up(node, error)
        with self._ledger:
            self._replacing.discard(node)
            if not self._ledger.is_open:
                if link is not None:
                    self._ledger.after.append(link.close)
                return
            if machine is None or link is None:
                self._task_events.node_lost(node, will_return=False)
                self._dispatcher.perform(self._ledger.scheduler.node_lost(node, will_return=False))
                return
            self._ledger.machines[node] = machine
            self._ledger.links[node] = link
            self._nodes.up(machine)
            self._task_events.node_replaced(node)
        self._ledger.watcher.wake()

    def not_replaced(self, node: int, error: BaseException) -> None:
        """Give up on a node whose replacement failed unexpectedly, so that no call waits for it."""
        self._give_up(node, error)
        with self._ledger:
            self._replacing.discard(node)
            if self._ledger.is_open:
                link = self._ledger.links.pop(node, None)
                if link is not None:
                    self._nodes.unwatch(link)
                    self._ledger.after.append(link.close)
                self._task_events.node_lost(node, will_return=False)
                self._dispatcher.perform(self._ledger.scheduler.node_lost(node, will_return=False))

    def _give_up(self, node: int, error: BaseException) -> None:
        if not self._ledger.is_open:
            return  # closing the pool ends all machines
        assert self.source is not None
        _log.error("node %d could not be replaced: %s", node, in_words(error))
        if not self.may_ask(node):
            return  # the next client has no machine to give up
        try:
            self.source.give_up(node)
        except Exception as failure:  # the caller must still fail the calls of the node
            _log.error("node %d: giving it up failed: %s", node, in_words(failure))
