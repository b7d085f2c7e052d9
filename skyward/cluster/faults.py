"""What an engine does when a link breaks or a node is gone: another link, or another node.

A part of `DirectEngine` in a file of its own: it changes the engine's books, while they are open.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from ..errors import InternalError, NodeError, Unreachable
from ..machine import PREEMPTED, Machine
from ..wire.ends import Ends
from .dial import LINK_TIMES, Forgotten
from .gang import RankTask
from .link import NodeLink
from .tasks import Loss, Task, loss_error

if TYPE_CHECKING:
    from .direct import DirectEngine

__all__ = ["Faults"]

_REPLACEMENT_TRIES = 3
"""How often a lost node gets another machine before it is given up, where those that it gets cannot be reached."""
_LOOK_S = 0.2


class Faults:
    """Links that break and nodes that are lost, and the notice that one will be."""

    def __init__(self, engine: DirectEngine) -> None:
        self._engine = engine
        self._taken_back: set[int] = set()
        """Nodes whose provider took the machine back; until another stands in their place and is lost."""

    # Lost links -----------------------------------------------------------------------------------------------------

    def link_gone(self, link: NodeLink, why: str) -> None:
        """Of a socket: the node is gone. Of a remote link: another is made, and until then nobody sees a difference."""
        if link.dialler is None:
            self._node_gone(link, why)
            return
        with self._engine._changing():
            if not self._engine._is_open or not link.channel.is_attached:
                return
            self._unwatch(link)
            ends = link.channel.release()
            self._engine._teller.link_lost(link.node, why)
            self._engine._perform(self._engine._scheduler.node_paused(link.node))
        threading.Thread(target=self._reconnect, args=(link, ends), name="skyward-reconnect", daemon=True).start()

    def _unwatch(self, link: NodeLink) -> None:
        link.is_led = link.is_blocked = False
        self._engine._watcher.remove(link)
        self._engine._liveness.forget(link)
        self._engine._dirty.discard(link)

    def _reconnect(self, link: NodeLink, ends: Ends | None) -> None:
        """In a thread of its own: another link to the same agent; once its lease must be over, the node is gone."""
        assert link.dialler is not None
        if ends is not None:
            ends.close()
        deadline = link.channel.heard_at + self._engine._machines[link.node].lease_s + LINK_TIMES.margin_s
        try:
            made, facts = link.dialler.dial_until(deadline, LINK_TIMES, lambda: self._why_gone(link.node))
        except (Forgotten, NodeError, InternalError) as error:
            self._node_gone(link, str(error))
            return
        with self._engine._changing():
            if not self._engine._is_open or self._engine._links.get(link.node) is not link:
                self._engine._after.append(made.close)
                return
            link.dialler.channel.attach(made, facts["received"])
            link.follow()
            link.may_widen = bool(facts.get("can_stripe"))
            self._engine._watch(link)
            self._engine._teller.link_restored(link.node)
            self._engine._perform(self._engine._scheduler.node_resumed(link.node))
        self._engine._wake()

    def _why_gone(self, node: int) -> str | None:
        return None if self._engine._source is None else self._engine._source.why_gone(node)

    # Lost nodes -----------------------------------------------------------------------------------------------------

    def _node_gone(self, link: NodeLink, why: str) -> None:
        with self._engine._changing():  # closed under the lock: another thread may be about to write to it
            self._engine._drop_line(link)
            self._unwatch(link)
            if link.dialler is None:
                link.close()
            else:
                self._engine._after.append(link.close)
            if not self._engine._is_open:
                return
            node = link.node
            if self._engine._links.get(node) is link:
                del self._engine._links[node]
            self._taken_back.discard(node)
            if why == PREEMPTED:
                self._taken_back.add(node)
            will_return = self._engine._source is not None
            self._engine._teller.node_lost(node, will_return=will_return, reason=why)
            for task in list(self._engine._tasks.values()):
                self._lose(task, node)
            self._engine._perform(self._engine._scheduler.node_lost(node, will_return=will_return))
            self._engine._gangs.node_lost(node)
            self._engine.nested.node_lost(node)
        if will_return:
            threading.Thread(target=self._replace, args=(node,), name="skyward-replace", daemon=True).start()

    def on_notice(self, node: int, said: bytes) -> None:
        """Its machine will be taken: send it nothing new, and see to another one."""
        self._engine._teller.preemption_notice(node, said)
        self._engine._perform(self._engine._scheduler.node_leaving(node))
        link = self._engine._links.get(node)
        if self._engine._source is not None and link is not None:
            threading.Thread(target=self._relieve, args=(link,), name="skyward-relieve", daemon=True).start()

    def _relieve(self, link: NodeLink) -> None:
        """In a thread of its own: once another machine is ready and nothing runs on this one, it is given up."""
        assert self._engine._source is not None
        try:
            is_ready = self._engine._source.prepare_replacement(link.node)
        except Exception as error:  # then it is replaced once it is gone
            sys.stderr.write(f"skyward: node {link.node}: no other machine yet: {type(error).__name__}: {error}\n")
            return
        while is_ready:
            with self._engine._lock:
                if not self._engine._is_open or self._engine._links.get(link.node) is not link:
                    return  # it is gone already
                if self._engine._scheduler.is_idle(link.node):
                    break
            time.sleep(_LOOK_S)
        if is_ready:
            self._node_gone(link, PREEMPTED)

    def _lose(self, task: Task, node: int) -> None:
        """Before the scheduler decides: tasks that handle their own loss, and streams, which cannot go on elsewhere."""
        if isinstance(task, RankTask):
            if task.node == node:
                self._engine._forget(task)
                loss = self.node_loss(node, started=True)
                self._engine._after.append(lambda: task.on_lost(loss))
            return
        if self._engine._scheduler.node_of(task.id) != node:
            return
        loss = self.node_loss(node, started=None)
        if task.is_cancelled or task.handles_loss or not task.may_move:
            self._engine._forget(task)
            self._engine._scheduler.drop(task.id)
            if task.handles_loss:
                self._engine._after.append(lambda: task.on_lost(loss))
            elif not task.is_cancelled:
                error = loss_error(loss, task.name)
                self._engine._after.append(lambda: task.on_failed(error))
        else:
            self._engine._losses[task.id] = loss

    def node_loss(self, node: int, *, started: bool | None) -> Loss:
        return Loss(node=node, started=started, is_node=True, is_preempted=node in self._taken_back)

    def _replace(self, node: int) -> None:
        """In a thread of its own: get another machine, or give up on the node."""
        assert self._engine._source is not None
        machine: Machine | None = None
        link: NodeLink | None = None
        try:
            for tries_left in range(_REPLACEMENT_TRIES - 1, -1, -1):
                machine = self._engine._source.replace(node)
                if machine is None or not self._engine._is_open:
                    break
                try:
                    link = self._engine._opener.open(machine)
                    break
                except Unreachable:
                    if not tries_left:
                        raise
        except Exception as error:  # the node's calls are told NodeLost; why there is no other node is told here
            self._give_up(node, error)
        with self._engine._changing():
            if not self._engine._is_open:
                if link is not None:
                    self._engine._after.append(link.close)
                return
            if machine is None or link is None:
                self._engine._teller.node_lost(node, will_return=False)
                self._engine._perform(self._engine._scheduler.node_lost(node, will_return=False))
                return
            self._engine._machines[node] = machine
            self._engine._links[node] = link
            self._engine._node_up(machine)
            self._engine._teller.node_replaced(node)
        self._engine._wake()

    def _give_up(self, node: int, error: Exception) -> None:
        if not self._engine._is_open:
            return  # the pool ends what there is
        assert self._engine._source is not None
        sys.stderr.write(f"skyward: node {node} could not be replaced: {type(error).__name__}: {error}\n")
        try:
            self._engine._source.give_up(node)
        except Exception as failure:
            sys.stderr.write(f"skyward: node {node}: and then: {type(failure).__name__}: {failure}\n")
