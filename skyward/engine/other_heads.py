"""Heads of a pool, one after another: when one is lost for good, its client begins another.

A pool without nodes has its head on the client's machine. When its last node is given back, the head moves there, and
when nodes come again it moves beside the first of them (`go_home`, `go_to`). Nothing runs then, so nothing is lost.

The next one runs on the same machine if only the process has ended, and otherwise beside the lowest node that answers.
A head that does not answer counts as lost only when its lease must be over, or the provider says that its machine is
gone. Its node is lost with it, unless that has another machine already. If no node is left, as in an elastic pool that
had one, the next head runs on the client's machine, without Ray, and gets other nodes.

The head of a detached pool has a watchdog that begins it again. If its machine is lost, the pool ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import NodeLost, SkywardError
from ..values.machine import Gone, Machine
from ..wire.ends import Ends
from .dialler import Dialler, Forgotten
from .head.messages import HeadConfig
from .head.place import HeadPlace, head_here, head_on
from .head.requests import Requests
from .head_link import HeadLink
from .head_machines import HeadMachines
from .hosted_calls import HeadLoss
from .ledger import Ledger
from .lender import Lender
from .link_times import LINK_TIMES
from .next_head import NextHead
from .threads import report, start_thread

if TYPE_CHECKING:
    from ..calls.futures import Future
    from .hosted_ray import HostedRay

_log = logging.getLogger(__name__)

_MOST_CHANGES = 32
"""Most heads in a row that are lost soon after they began: what ends them would end the next one, too."""
_SOON_S = 60.0
_MOST_MOVES = 1 << 15
"""Most heads in all, because each has numbers of its own."""
_DIAL_S = 20.0

HeadCommand = Callable[[], tuple[str, ...]]
"""Function that returns the local command whose standard input and output are a channel to a head at this time."""


class OtherHeads:
    """The head of a pool, and those after it. Thread-safe.

    Args:
        config: Configuration of the first head.
        place: Place of the first head.
        ledger: Shared state of the client's engine.
        requests: Requests to the head.
        next_head: Changes to another head.
        dialler: Returns a dialler for a command that reaches a head.
        machines: Source of machines.
        lender: Channels that the head uses.
        ray: Ray beside the head.
        are_apart: Whether the nodes are on other machines.
    """

    may_change = False
    """Whether another head may begin. Set once the first one has reached all nodes."""

    def __init__(
        self,
        config: HeadConfig,
        place: HeadPlace,
        ledger: Ledger,
        requests: Requests,
        next_head: NextHead,
        *,
        dialler: Callable[[HeadCommand], Dialler],
        machines: HeadMachines,
        lender: Lender,
        ray: HostedRay,
        are_apart: bool,
    ) -> None:
        self._config = config
        self._place = place
        self._ledger = ledger
        self._requests = requests
        self._next_head = next_head
        self._dialler = dialler
        self._machines = machines
        self._lender = lender
        self._ray = ray
        self.node: int | None = 0
        """Node of the head; None for one on this machine, unless all nodes are there."""
        self._machine: Machine | None = None
        """Machine that the head shares with its node; None: it shares none."""
        self._is_node_lost = False
        """Whether the head has found the node beside it lost. Its machine may still be there."""
        self._is_gated = bool(config.node_folder)
        """Whether calls begin on that node only once they are known here, or permitted; see `head.start_gate`."""
        self._are_apart = are_apart
        self._losses = 0
        """Number of heads in a row that were lost soon after they began."""
        self._began_at = time.monotonic()
        self._things: set[tuple[str, str]] = set()
        """Kinds and names of the shared state that is in use, or is lost."""
        self._lost_things: frozenset[tuple[str, str]] = frozenset()
        self._lock = threading.Lock()
        self._is_stopped = False

    @property
    def beside(self) -> int | None:
        """Return the node beside the head; None if it is on another machine."""
        return self.node if self._is_gated else None

    def start(self) -> HeadCommand:
        """Start the first head, and return the command that reaches it. Raises ProviderError."""
        self.node = None if self._are_apart and not self._is_gated else 0
        self._machine = self._machine_now if self._is_gated else None
        return self._command(self._place, 0, self._place.start(self._config))

    def _command(self, place: HeadPlace, node: int, argv: tuple[str, ...]) -> HeadCommand:
        """Return the command that reaches a head. When its node was replaced, the login of the former one is closed."""
        first = self._ledger.machines.get(node)

        def command() -> tuple[str, ...]:
            machine = self._ledger.machines.get(node)
            return argv if machine is None or machine is first else place.channel_by(machine) or argv

        return command

    def stop(self) -> None:
        """End the head, and begin no other. Idempotent."""
        with self._lock:
            self._is_stopped, place = True, self._place
        place.stop()

    def forget_in_child(self) -> None:
        """Let go of the head in a fork of this process."""
        self._place.forget_in_child()

    def note_thing(self, thing: tuple[str, str], *, is_there: bool) -> None:
        """Note that a thing of shared state has come about, or equals a new one."""
        if is_there:
            self._things.add(thing)
        else:
            self._things.discard(thing)

    def node_replaced(self, node: int) -> None:
        """Note that a node is another machine now. It is not beside the head, so its calls have no gate."""
        if node == self.node:
            self._is_gated, self._is_node_lost = False, True

    @property
    def _machine_now(self) -> Machine | None:
        """Return the present machine of the head's node."""
        return None if self.node is None else self._ledger.machines.get(self.node)

    @property
    def _has_moved(self) -> bool:
        """Return whether the head's node has no machine now, or another one than the head."""
        machine, before = self._machine_now, self._machine
        if machine is None or before is None or machine is before:
            return machine is None
        return machine.offer is not None or machine.peer.private_ip != before.peer.private_ip

    @property
    def machine_ends(self) -> bool:
        """Return whether the head's machine ends, because another one took its place. Only rented ones do."""
        is_rented = self._machine is not None and self._machine.offer is not None
        return self.may_change and is_rented and self._has_moved

    def why_gone(self) -> Gone | None:
        """Return why the head's machine is certainly gone; None if it may be there. May block for seconds."""
        if self.machine_ends:
            return Gone(reason="its machine was replaced")
        return None if self.node is None else self._machines.why_gone(self.node)

    def change(self, before: HeadLink, why: str, *, has_ended: bool, gone: Gone | None = None) -> bool:
        """Go on with another head. Blocks until it is there. Return False if there is none.

        Args:
            before: Link to the head that is lost.
            why: The reason.
            has_ended: Whether its machine says that it has ended. Otherwise its node is lost too.
            gone: Reason why its machine is gone for certain, if it is.
        """
        if time.monotonic() - self._began_at > _SOON_S:
            self._losses = 0
        if not self.may_change or self._losses == _MOST_CHANGES:
            return False
        self._losses += 1
        self._leave(self._place)
        self._lost_things |= self._things
        self._count()
        lost = frozenset[int]() if has_ended or self.node is None or self._has_moved else frozenset((self.node,))
        is_noted = self._is_node_lost and self._machine_now is self._machine
        relieved = self._machines.relieved
        loss = HeadLoss(
            lost=lost | relieved,
            noted=lost | relieved if is_noted else relieved,
            beside=frozenset() if self.beside is None else frozenset((self.beside,)),
            is_preempted=gone is not None and gone.is_preempted,
        )
        for node in self._candidates(loss.lost):
            if not self._ledger.is_open:
                return True  # the pool is closed, which ends everything
            if self._begin_on(node, before, loss):
                _log.warning("head of the pool: is gone (%s); another one goes on beside node %d", why, node)
                return True
        return self._are_apart and self._begin_here(before, why, loss)

    def _count(self) -> HeadConfig:
        """Return the configuration of a further head. It has other numbers, and knows what is lost for good."""
        with self._lock:
            self._config = replace(
                self._config, heads_before=self._config.heads_before + 1, lost_things=tuple(sorted(self._lost_things))
            )
            return self._config

    def _begin_here(self, before: HeadLink, why: str, loss: HeadLoss) -> bool:
        """Begin a head on this machine, because no node answers. Return False if that fails."""
        config, place = head_here(self._config)
        if not self._begin(config, place, None, before, loss):
            return False
        _log.warning("head of the pool: is gone (%s), and no node answers; another one goes on here", why)
        return True

    def _candidates(self, lost: frozenset[int]) -> Iterator[int]:
        """Return the nodes beside which a head may run: its own one, if that is there, and then all others.

        Machines that the provider takes back come last, and those that it says are gone do not come.
        """
        with self._ledger:
            nodes = sorted(set(self._ledger.machines) - lost)
        for node in sorted(nodes, key=lambda node: (self._machines.is_taken(node), node != self.node)):
            if node == self.node or self._machines.why_gone(node) is None:
                yield node

    def _begin_on(self, node: int, before: HeadLink, loss: HeadLoss) -> bool:
        """Begin a head beside a node. Return False if that fails."""
        machine = self._ledger.machines.get(node)
        if machine is None:
            return False
        config, place = head_on(machine, self._config)
        return self._begin(config, place, node, before, loss)

    def _begin(self, config: HeadConfig, place: HeadPlace, node: int | None, before: HeadLink, loss: HeadLoss) -> bool:
        other = self._reach(config, place, node)
        if other is None:
            return False
        self._go_on(other, before, loss)
        if node is None and not self._ledger.machines:  # it was lost while it gave the last one back, or after that
            self._ray.rest()
        elif node is None:
            self._ray.give_up("no node was left, so the scheduler is in this program")
        else:
            self._ray.move(node)
        return True

    def _reach(self, config: HeadConfig, place: HeadPlace, node: int | None) -> _OtherHead | None:
        """Start a head and dial it. Return None if that fails."""
        try:
            argv = place.start(config)
            dialler = self._dialler((lambda: argv) if node is None else self._command(place, node, argv))
            ends, facts = dialler.dial_until(time.monotonic() + _DIAL_S, LINK_TIMES)
        except (SkywardError, OSError, Forgotten) as error:  # TimeoutError: its machine hangs
            _log.warning("%s: no head begins there: %s", "client" if node is None else f"node {node}", error)
            self._leave(place)
            return None
        return _OtherHead(config, place, node, dialler, ends, facts)

    def _go_on(self, other: _OtherHead, before: HeadLink, loss: HeadLoss, things: bytes = b"") -> Future[Any] | None:
        """Go on with a head that was dialled. `things`: shared state that the former one has handed over."""
        with self._lock:
            self._place, self.node, is_stopped = other.place, other.node, self._is_stopped
        self._is_gated, self._is_node_lost = bool(other.config.node_folder), False
        self._began_at = time.monotonic()
        self._machine = self._machine_now if self._is_gated else None
        self._lender.end_all()
        begun = self._next_head.begin(
            before,
            other.dialler,
            other.ends,
            other.facts,
            loss=loss,
            machines=self._machines.told,
            lease_s=other.config.lease_s,
            things=things,
        )
        if is_stopped:
            other.place.stop()
        return begun

    # A head that is well ----------------------------------------------------------------------------------------------

    def go_home(self, node: int) -> bool:
        """Give back the last node, which is beside the head, and go on with a head on this machine.

        Return False, and change nothing, if the node is in use. Blocks until the former head has ended, because its
        machine is given back then.
        """
        before = self._may_move(node)
        if before is None or set(self._ledger.machines) != {node}:
            return False
        home = self._reach(*head_here(self._count()), None)
        try:
            if home is None or self._hand_over(home, before, node) is None:
                return False
        except NodeLost:  # another head begins, and finds out what became of the node, unless its end was told
            return False
        self._ray.rest()
        return True

    def go_to(self, nodes: Iterable[int]) -> Future[Any] | None:
        """Go on with a head beside one of these nodes, which are the first that come.

        Return a future of the time when it has reached the nodes; None: the head stays where it is, and has not heard
        of them. Raises NodeLost if the head is lost meanwhile.
        """
        before = self._may_move() if self._are_apart else None
        for node in nodes if before is not None else ():
            assert before is not None
            config, place = head_on(self._ledger.machines[node], self._count())
            other = self._reach(config, place, node)
            if other is not None:
                return self._hand_over(other, before)
        return None

    def _may_move(self, node: int | None = None) -> HeadLink | None:
        """Return the link to the present head if another one may go on for it."""
        before = self._next_head.present
        may_move = self.may_change and before is not None and self._config.heads_before < _MOST_MOVES
        return before if may_move and self._requests.ask("may_hand_over", node) else None

    def _hand_over(self, other: _OtherHead, before: HeadLink, node: int | None = None) -> Future[Any] | None:
        """Let the present head end, and another one go on. Return None, and end that one, if the present one goes on.

        Args:
            other: The other head.
            before: Link to the present one.
            node: Node that is given back first.
        """
        begun: Future[Any] | None = None
        try:
            with self._ledger:  # `before` must get this, not another one that has begun since
                asked = self._requests.begin("hand_over", node) if self._next_head.present is before else None
            is_done, things = (False, b"") if asked is None else asked.result()
            if is_done and self._next_head.leave(before):
                former = self._place
                if node is None:
                    begun = self._go_on(other, before, HeadLoss(is_none=True), things)
                    self._leave(former)
                else:
                    begun = self._go_on(other, before, HeadLoss(is_none=True), things)
                    former.stop(at_once=True)
        finally:
            if begun is None:
                other.ends.close()
                self._leave(other.place)
        return begun

    @staticmethod
    def _leave(place: HeadPlace) -> None:
        """End a head in a thread, because its machine may not answer. Its lease ends it then."""
        start_thread(partial(place.stop, at_once=True), name="skyward-old-head", failed=report)


class _OtherHead(NamedTuple):
    """Head that was started and dialled, and does not have the pool yet. `node`: None if it is on this machine."""

    config: HeadConfig
    place: HeadPlace
    node: int | None
    dialler: Dialler
    ends: Ends
    facts: dict[str, Any]
