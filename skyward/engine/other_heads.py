"""Heads of a pool, one after another: when one is lost for good, its client begins another.

The next one runs on the same machine if only the process has ended, and otherwise beside the lowest node that answers.
A head that does not answer counts as lost only when its lease must be over, and its node is lost with it. If no node is
left, as in an elastic pool that had one, the next head runs on the client's machine, without Ray, and gets other nodes.

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
from .dialler import Dialler, Forgotten
from .head.messages import HeadConfig
from .head.place import HeadPlace, head_here, head_on
from .head_link import HeadLink
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
        lender: Lender,
        raiser: RayRaiser | None,
    ) -> None:
        self._config = config
        self._place = place
        self._ledger = ledger
        self._next_head = next_head
        self._dialler = dialler
        self._lender = lender
        self._raiser = raiser
        self.node: int | None = 0
        """Node of the head; None for one on this machine that took the place of another."""
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
        self._is_gated &= node != self.node

    def change(self, before: HeadLink, why: str, *, has_ended: bool) -> bool:
        """Go on with another head. Blocks until it is there. Return False if there is none.

        Args:
            before: Link to the head that is lost.
            why: The reason.
            has_ended: Whether its machine says that it has ended. Otherwise its node is lost too.
        """
        if not self.may_change or self._config.heads_before == _MOST_CHANGES:
            return False
        self._leave(self._place)
        self._lost_things |= self._things
        self._config = replace(
            self._config, heads_before=self._config.heads_before + 1, lost_things=tuple(sorted(self._lost_things))
        )
        lost = frozenset[int]() if has_ended or self.node is None else frozenset((self.node,))
        for node in self._candidates(lost):
            if not self._ledger.is_open:
                return True  # the pool is closed, which ends everything
            if self._begin_on(node, before, lost):
                _log.warning("head of the pool: is gone (%s); another one goes on beside node %d", why, node)
                return True
        return self._is_on_machines and self._begin_here(before, why, lost)

    def _begin_here(self, before: HeadLink, why: str, lost: frozenset[int]) -> bool:
        """Begin a head on this machine, because no node answers. Return False if that fails."""
        config, place = head_here(self._config)
        if not self._begin(config, place, None, before, lost):
            return False
        _log.warning("head of the pool: is gone (%s), and no node answers; another one goes on here", why)
        return True

    def _candidates(self, lost: frozenset[int]) -> Iterator[int]:
        """Return the nodes beside which a head may run: its own one, if that is there, and then all others."""
        with self._ledger:
            nodes = sorted(set(self._ledger.machines) - lost)
        return iter(sorted(nodes, key=lambda node: node != self.node))

    def _begin_on(self, node: int, before: HeadLink, lost: frozenset[int]) -> bool:
        """Begin a head beside a node. Return False if that fails."""
        machine = self._ledger.machines.get(node)
        if machine is None:
            return False
        config, place = head_on(machine, self._config)
        return self._begin(config, place, node, before, lost)

    def _begin(
        self, config: HeadConfig, place: HeadPlace, node: int | None, before: HeadLink, lost: frozenset[int]
    ) -> bool:
        try:
            argv = place.start(config)
            dialler = self._dialler((lambda: argv) if node is None else self._command(place, node, argv))
            ends, facts = dialler.dial_until(time.monotonic() + _DIAL_S, LINK_TIMES)
        except (SkywardError, Forgotten) as error:
            _log.warning("%s: no head begins there: %s", "client" if node is None else f"node {node}", error)
            self._leave(place)
            return False
        beside = frozenset[int]() if self.beside is None else frozenset((self.beside,))
        with self._lock:
            self._place, self.node, is_stopped = place, node, self._is_stopped
        self._is_gated = bool(config.node_folder)
        self._lender.end_all()
        self._next_head.begin(before, dialler, ends, facts, lost=lost, beside=beside)
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
