"""Nodes that come and go while a head runs: requests of its client, which decides and has the machines.

The agent of a node that goes holds outcomes until the client has them (`settling`), and ends with them. So the client
hears first that the node goes, behind all outcomes. From then on its books say that nothing is left there. If the head
dies before, the next one finds the node. If it dies after, the next one does not look for it: it does not miss a node
that was given back, and asks for the other machine of one that was relieved.

The head of a detached pool finds its nodes in its journal if it is killed, not in the books of a client. So it notes a
node in the same block in which it begins to use it, and strikes out one that goes once the client has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ...calls.futures import Future
from ...values.machine import Machine
from ..members import Membership
from ..relief import Relief


class ComingNodes:
    """Verbs of the client about the nodes. They may take time, and wait until the nodes of an earlier head are known.

    Args:
        members: Nodes of the engine.
        relief: Relief of those whose machines are taken back.
        ask: Asks the client, behind all outcomes, whether it is there.
        tell: Sends it a request about a node, behind all outcomes.
        left: Called with the number of a node that was given back.
        note: Notes which nodes there are, and which may come. Raises UsageError if there is no room.
        changed: The same if there is room.
        is_first: Whether this is the pool's first head.
        has_journal: Whether outcomes are in a journal, so that nobody waits until the client has them.
    """

    def __init__(
        self,
        members: Membership,
        relief: Relief,
        *,
        ask: Callable[[], Future[Any]],
        tell: Callable[[str, int], Future[Any]],
        left: Callable[[int], object],
        note: Callable[[], object],
        changed: Callable[[], object],
        is_first: bool,
        has_journal: bool,
    ) -> None:
        self._members = members
        self._ask, self._tell = ask, tell
        self._left, self._note, self._changed = left, note, changed
        if not has_journal:
            relief.confirm = partial(self._confirm, "relieved")
        self.are_known = threading.Event()
        """Set when the nodes of an earlier head are known. Until then, all would seem to be at rest."""
        if is_first:
            self.are_known.set()
        verbs: Mapping[str, Callable[..., Any]] = {
            "demand": members.demand,
            "join": self._join,
            "node_leaves": self._leave,
            "stay": lambda count: (members.stay(count), sorted(members.leaving)),
            "move_values": members.move_values,
            "give_back": self.give_back,
            "refuse_resting": members.refuse_resting,
        }
        self.verbs = {verb: partial(self.once_known, act) for verb, act in verbs.items()}

    def once_known(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function once it is known which nodes an earlier head had."""
        self.are_known.wait()  # in a thread of the request, which ends with this process
        return act(*arguments)

    def expect(self, nodes: Iterable[int], slots: int) -> None:
        """Register nodes that may come; see `Membership.expect`."""
        self._members.expect(nodes, slots, then=self._changed)

    def _join(self, machines: Sequence[Machine]) -> None:
        self._members.join(machines, then=self._note)

    def _leave(self, node: int) -> list[int]:
        """Send a node no new calls, and return all nodes that get none."""
        self._members.leave(node)
        return sorted(self._members.leaving)

    def give_back(self, node: int) -> bool:
        """Stop using a node. Return False if it is in use. Its agent ends once the client has all of its outcomes."""
        is_gone = self._members.give_back(node, confirm=partial(self._confirm, "given_back", node))
        if is_gone:
            self._left(node)
        return is_gone

    def _confirm(self, verb: str, node: int) -> None:
        """Wait until the client has all outcomes of a node, and knows that it goes.

        Runs in a thread that ends with this process: when the client is gone, or is away for longer than the lease.
        """
        # The end of a gang is sent a moment after its last rank has ended. The thread that does that reads this reply.
        self._ask().result()
        self._tell(verb, node).result()
        self._changed()
