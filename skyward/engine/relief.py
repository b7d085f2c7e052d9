"""Relief of nodes whose machines their provider takes back: another machine comes before the old one goes.

After the notice a node gets no new calls. Once another machine is ready and nothing runs there anymore, its values move
to other nodes, and it goes as a node that is given back does (`members.part_with`): its outcomes must be with whoever
goes on after this process. Only then its machine is replaced, which ends the old one. A node that is taken before that
is lost as any other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from ..errors import PoolClosed
from ..values.machine import PREEMPTED, Machines
from .ledger import Ledger
from .link import NodeLink
from .link_repair import LinkRepair
from .members import Membership
from .task_dispatcher import TaskDispatcher
from .task_events import TaskEvents
from .threads import in_words, start_thread

_log = logging.getLogger(__name__)

_LOOK_S = 0.2
_MOVE_S = 60.0
"""Longest time in seconds for the values of a node, because the other machine is paid meanwhile."""


class Relief:
    """Relief of nodes by other machines. Thread-safe.

    Args:
        ledger: Shared state of the engine.
        dispatcher: Carries out the decisions of the scheduler.
        task_events: Gets the events of nodes.
        members: Nodes of the engine.
        repair: Replaces them.
    """

    def __init__(
        self,
        ledger: Ledger,
        dispatcher: TaskDispatcher,
        task_events: TaskEvents,
        members: Membership,
        repair: LinkRepair,
    ) -> None:
        self._ledger, self._dispatcher, self._task_events = ledger, dispatcher, task_events
        self._members, self._repair = members, repair
        self.confirm: Callable[[int], object] = lambda node: None
        """Returns once whoever goes on after this process has all outcomes of a node, and knows that it is relieved."""

    def on_notice(self, node: int, notice: bytes) -> None:
        """Stop using a node whose machine will be taken back, and start to look for another machine."""
        self._task_events.preemption_notice(node, notice)
        self._dispatcher.perform(self._ledger.scheduler.node_leaving(node))
        link, source = self._ledger.links.get(node), self._repair.source
        if link is not None:
            link.has_notice = True
        if source is not None and link is not None and self._repair.may_ask(node):
            start_thread(
                lambda: self._relieve(link, source),
                name="skyward-relieve",
                failed=lambda error: self._failed(link, error),
            )

    def _relieve(self, link: NodeLink, source: Machines) -> None:
        """Give up a node, in a separate thread, once another machine is ready and nothing runs on this one."""
        try:
            is_ready = source.prepare_replacement(link.node)
        except Exception as error:  # the node is replaced later, once it is gone
            _log.warning("node %d: no replacement is ready before its machine is taken: %s", link.node, in_words(error))
            return
        if is_ready and self._went(link):
            self._repair.begin_to_replace(link.node)

    def _went(self, link: NodeLink) -> bool:
        """Wait until nothing runs on a node, and let it go. Return False if it is lost, or nobody can replace it now.

        Without its client a detached pool needs the node until the machine is taken.
        """
        moves_until = 0.0
        while self._is_there(link):
            if self._is_idle(link):
                moves_until = moves_until or time.monotonic() + _MOVE_S
                is_moving = self._members.move_values(link.node) and time.monotonic() < moves_until
                if not is_moving and self._part_with(link):
                    return True
            time.sleep(_LOOK_S)
        return False

    def _part_with(self, link: NodeLink) -> bool:
        try:
            return self._members.part_with(
                link,
                may_go=lambda: self._is_there(link) and self._is_idle(link),
                take_out=lambda: self._repair.strike_out(link, PREEMPTED),
                finish=partial(self.confirm, link.node),
            )
        except PoolClosed:  # this process ends, and another one may go on
            return False

    def _is_there(self, link: NodeLink) -> bool:
        with self._ledger.lock:
            is_known = self._ledger.is_open and self._ledger.links.get(link.node) is link
            return is_known and self._repair.may_ask(link.node)

    def _is_idle(self, link: NodeLink) -> bool:
        with self._ledger.lock:
            return link.channel.is_attached and self._ledger.scheduler.is_idle(link.node)

    def _failed(self, link: NodeLink, error: BaseException) -> None:
        """Say why a node was not relieved. Give it up if it is in no book anymore, so that no call waits for it."""
        if link.node in self._ledger.links:
            _log.error("node %d: could not prepare a replacement: %s", link.node, in_words(error))
        else:
            self._repair.not_replaced(link.node, error)
