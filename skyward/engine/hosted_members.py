"""Nodes of a pool whose scheduler runs in a head: the head says what they do, and the client says which there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import NodeLost
from ..schedule.scaling import Demand
from ..values.machine import Machine
from .head.requests import Requests
from .head_machines import without_ways
from .ledger import Ledger

if TYPE_CHECKING:
    from ..calls.futures import Future
    from .other_heads import OtherHeads


class HostedMembers:
    """Nodes that come and go; see `PoolMembers`. Thread-safe.

    The machines in the ledger are those of the nodes that are there, of lost ones that will be replaced, and of those
    that join. If the head is lost, the next one gets all of them.

    Args:
        ledger: Shared state of the client's engine.
        requests: Requests to the head.
        heads: Returns the heads of the pool.
        joined: Called when further nodes are there.
        left: Called with the number of a node that was given back.
        is_detached: Whether the head is the same after its death, by its journal. Another one gets all machines here.
    """

    keeps: Callable[[int], bool] = staticmethod(lambda node: False)

    def __init__(
        self,
        ledger: Ledger,
        requests: Requests,
        *,
        heads: Callable[[], OtherHeads],
        joined: Callable[[], object],
        left: Callable[[int], object],
        is_detached: bool = False,
    ) -> None:
        self._ledger = ledger
        self._is_detached = is_detached
        self._requests = requests
        self._heads_of_pool = heads
        self._joined = joined
        self._left = left
        self._expected: dict[int, int] = {}
        """Slots of the nodes that may come."""
        self._joining: set[int] = set()
        self._heads = 1
        """Number of heads so far."""
        self._leaving: frozenset[int] = frozenset()
        self._gone: set[int] = set()
        """Nodes that the head was about to end, as it has told, when they were given back last."""

    @property
    def there(self) -> tuple[int, ...]:
        with self._ledger.lock:
            return tuple(sorted(set(self._ledger.machines) - self._joining - self._leaving))

    @property
    def last(self) -> frozenset[int]:
        beside = self._heads_of_pool().beside
        return frozenset() if beside is None else frozenset((beside,))

    @property
    def is_idle(self) -> bool:
        ledger = self._ledger
        with ledger.lock:
            if ledger.tasks or ledger.gangs or ledger.actors:
                return False
        return bool(self._requests.ask("is_idle"))

    def demand(self) -> Demand:
        demand: Demand = self._requests.ask("demand")
        return demand

    def expect(self, nodes: Iterable[int], slots: int) -> None:
        with self._ledger:
            self._expected |= dict.fromkeys(nodes, slots)
            self._tell_expected()

    def _tell_expected(self) -> None:
        by_slots: dict[int, list[int]] = {}
        for node, slots in self._expected.items():
            if node not in self._ledger.machines:
                by_slots.setdefault(slots, []).append(node)
                # The scheduler here places nothing. It only knows that there may be such a node.
                self._ledger.scheduler.node_absent(node, slots)
        for slots, nodes in by_slots.items():
            self._requests.tell("expect", nodes, slots)

    def join(self, machines: Sequence[Machine]) -> None:
        nodes = {machine.node for machine in machines}
        with self._ledger:  # in one block: another head gets the request, or these machines with all others
            heads, are_first = self._heads, not self._ledger.machines
            self._joining |= nodes
            self._ledger.machines.update((machine.node, machine) for machine in machines)
            asked = None if are_first else self._ask_to_join(machines)
        try:
            if asked is None:
                asked, heads = self._begin_to_join(machines, heads)
            while not self._have_joined(machines, asked, heads):
                heads, asked = self._heads, self._ask_to_join(machines)
        finally:
            with self._ledger:
                self._joining -= nodes
        self._joined()

    def have_come(self, nodes: Iterable[int]) -> None:
        """Note that nodes are up, before calls that ran on them return. The head's reply to `join` may come later.

        Needs the ledger's lock.
        """
        self._joining.difference_update(nodes)

    def _begin_to_join(self, machines: Sequence[Machine], heads: int) -> tuple[Future[Any] | None, int]:
        """Let the head move to the first nodes of a pool, or tell it of them.

        Return the future of its reply, and the number of heads so far; None: another head got the machines meanwhile.
        """
        try:
            moved = self._heads_of_pool().go_to(sorted(machine.node for machine in machines))
        except BaseException:
            if self._are_struck_out(machines, heads):
                raise
            return None, heads
        return (self._ask_to_join(machines), heads) if moved is None else (moved, heads + 1)

    def _have_joined(self, machines: Sequence[Machine], asked: Future[Any] | None, heads: int) -> bool:
        """Wait for nodes to join. Return False if a detached pool's head must be asked again. Raises why they do not.

        Args:
            machines: Their machines.
            asked: Future of the head's reply; None: another head got the machines.
            heads: Number of heads when it was asked.
        """
        try:
            if asked is not None:
                asked.result()
        except BaseException:
            if self._are_struck_out(machines, heads):
                raise
            return not self._is_detached
        return True

    def _are_struck_out(self, machines: Sequence[Machine], heads: int) -> bool:
        """Forget nodes that could not join.

        Return False if the head is gone that was asked: the next one gets their machines with all others.
        """
        with self._ledger:
            is_over = self._heads == heads or not self._ledger.is_open
            for machine in machines if is_over else ():
                self._ledger.machines.pop(machine.node, None)
            return is_over

    def _ask_to_join(self, machines: Sequence[Machine]) -> Future[Any]:
        return self._requests.begin("join", [without_ways(machine) for machine in machines])

    @property
    def leaving(self) -> frozenset[int]:
        return self._leaving

    def leave(self, node: int) -> None:
        self._leaving = frozenset(self._requests.ask("node_leaves", node))

    def stay(self, count: int) -> int:
        if not self._leaving:
            return 0
        stayed, leaving = self._requests.ask("stay", count)
        self._leaving = frozenset(leaving)
        return int(stayed)

    def node_lost(self, node: int) -> None:
        """Forget that a lost node was leaving, because its replacement takes calls."""
        self._leaving -= {node}

    def move_values(self, node: int) -> None:
        self._requests.ask("move_values", node)

    def give_back(self, node: int) -> bool:
        machine = self._ledger.machines.get(node)
        if machine is None:
            return False
        self._expected.setdefault(node, machine.slots)  # first, so that another head is told of it
        self._gone.discard(node)
        give_back = self._heads_of_pool().go_home if node in self.last else partial(self._requests.ask, "give_back")
        try:
            give_back(node)
        except NodeLost:  # with the head, which may have told of the node
            if node not in self._gone:
                raise
        if node not in self._gone:  # whatever the answer of a head that does not know the node
            return False
        self._left(node)
        return True

    def given_back(self, node: int) -> None:
        """Strike out a node, as the head tells: all of its outcomes are here, and its agent ends now.

        Needs the ledger's lock.
        """
        self._ledger.machines.pop(node, None)
        self._leaving -= {node}
        self._gone.add(node)

    def refuse_resting(self, slots: int) -> None:
        self._requests.ask("refuse_resting", slots)

    def go_on(self) -> None:
        """Tell another head which nodes may come. Nodes that were leaving take calls there. Needs the ledger's lock."""
        self._heads += 1
        self._leaving = frozenset()
        self._tell_expected()
