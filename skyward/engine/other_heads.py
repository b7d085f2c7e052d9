"""Heads of a pool, one after another: when one is lost for good, its client begins another.

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
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import SkywardError
from ..values.machine import Gone, Machine
from .dialler import Dialler, Forgotten
from .head.messages import HeadConfig
from .head.place import HeadPlace, head_here, head_on
from .head_link import HeadLink
from .head_machines import HeadMachines
from .hosted_calls import HeadLoss
from .ledger import Ledger
from .lender import Lender
from .link_times import LINK_TIMES
from .next_head import NextHead
from .threads import report, start_thread

if TYPE_CHECKING:
    from .ray.raiser import RayRaiser

_log = logging.getLogger(__name__)

_MOST_CHANGES = 16
_DIAL_S = 20.0

HeadCommand = Callable[[], tuple[str, ...]]
"""Function that returns the local command whose standard input and output are a channel to a head at this time."""


class OtherHeads:
    """The head of a pool, and those after it. Thread-safe.

    Args:
        config: Configuration of the first head.
        place: Place of the first head.
        ledger: Shared state of the client's engine.
        next_head: Changes to another head.
        dialler: Returns a dialler for a command that reaches a head.
        machines: Source of machines.
        lender: Channels that the head uses.
        raiser: Raises Ray beside the head; None: there is none.
    """

    may_change = False
    """Whether another head may begin. Set once the first one has reached all nodes."""

    def __init__(
        self,
        config: HeadConfig,
        place: HeadPlace,
        ledger: Ledger,
        next_head: NextHead,
        *,
        dialler: Callable[[HeadCommand], Dialler],
        machines: HeadMachines,
        lender: Lender,
        raiser: RayRaiser | None,
    ) -> None:
        self._config = config
        self._place = place
        self._ledger = ledger
        self._next_head = next_head
        self._dialler = dialler
        self._machines = machines
        self._lender = lender
        self._raiser = raiser
        self.node: int | None = 0
        """Node of the head; None for one on this machine that took the place of another."""
        self._machine: Machine | None = None
        """Machine that the head shares with its node; None: it shares none."""
        self._is_node_lost = False
        """Whether the head has found the node beside it lost. Its machine may still be there."""
        self._is_gated = bool(config.node_folder)
        """Whether calls begin on that node only once they are known here, or permitted; see `head.start_gate`."""
        self._is_on_machines = self._is_gated
        """Whether the nodes are on other machines."""
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
        """Start the first head, beside node 0, and return the command that reaches it. Raises ProviderError."""
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
        if not self.may_change or self._config.heads_before == _MOST_CHANGES:
            return False
        self._leave(self._place)
        self._lost_things |= self._things
        self._config = replace(
            self._config, heads_before=self._config.heads_before + 1, lost_things=tuple(sorted(self._lost_things))
        )
        lost = frozenset[int]() if has_ended or self.node is None or self._has_moved else frozenset((self.node,))
        is_noted = self._is_node_lost and self._machine_now is self._machine
        loss = HeadLoss(
            lost=lost,
            noted=lost if is_noted else frozenset(),
            beside=frozenset() if self.beside is None else frozenset((self.beside,)),
            is_preempted=gone is not None and gone.is_preempted,
        )
        for node in self._candidates(lost):
            if not self._ledger.is_open:
                return True  # the pool is closed, which ends everything
            if self._begin_on(node, before, loss):
                _log.warning("head of the pool: is gone (%s); another one goes on beside node %d", why, node)
                return True
        return self._is_on_machines and self._begin_here(before, why, loss)

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
        try:
            argv = place.start(config)
            dialler = self._dialler((lambda: argv) if node is None else self._command(place, node, argv))
            ends, facts = dialler.dial_until(time.monotonic() + _DIAL_S, LINK_TIMES)
        except (SkywardError, Forgotten) as error:
            _log.warning("%s: no head begins there: %s", "client" if node is None else f"node {node}", error)
            self._leave(place)
            return False
        with self._lock:
            self._place, self.node, is_stopped = place, node, self._is_stopped
        self._is_gated, self._is_node_lost = bool(config.node_folder), False
        self._machine = self._machine_now if self._is_gated else None
        self._lender.end_all()
        self._next_head.begin(before, dialler, ends, facts, loss=loss, machines=self._machines.told)
        if is_stopped:
            place.stop()
        elif self._raiser is not None and node is None:
            self._raiser.give_up("no node was left, so the scheduler is in this program")
        elif self._raiser is not None and node is not None:
            self._raiser.move(node)
        return True

    @staticmethod
    def _leave(place: HeadPlace) -> None:
        """End a head in a thread, because its machine may not answer. Its lease ends it then."""
        start_thread(place.stop, name="skyward-old-head", failed=report)
