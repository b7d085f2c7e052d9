"""Nodes of a detached pool in the journal of its head: their machines, those that are lost, and those that rest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from ...console.words import duration
from ...errors import UsageError
from ...events import NodeLost
from ...values.machine import Machine
from ..ledger import Ledger
from .kept_calls import KeptCalls
from .plain import dump_plain, load_plain


class KeptNodes:
    """Nodes as the next process of a head finds them. Used under the ledger's lock, which `changed` takes.

    If the disk is full, no node joins, and others stay as they were noted: the next process finds out itself.

    Args:
        ledger: Shared state of the engine.
        kept: State of a detached pool; None for another one, of which nothing is noted.
    """

    def __init__(self, ledger: Ledger, kept: KeptCalls | None) -> None:
        self._ledger = ledger
        self._kept = kept

    @property
    def machines(self) -> list[Machine]:
        """Machines that were noted, those of lost nodes included."""
        noted = None if self._kept is None else self._kept.state.get("machines")
        machines: list[Machine] = [] if noted is None else load_plain(noted)
        return machines

    @property
    def lost(self) -> list[int]:
        """Nodes that were lost, and not replaced."""
        return [] if self._kept is None else self._kept.state.get("lost", [])

    @property
    def resting(self) -> list[int]:
        """Nodes of an elastic pool that are not there on purpose."""
        return [] if self._kept is None else self._kept.state.get("resting", [])

    def begin(self, machines: Sequence[Machine]) -> None:
        """Note the first machines. Raises UsageError if the journal has no room for them."""
        if self._kept is not None:
            self._kept.note(machines=dump_plain(list(machines)))

    def changed(self) -> None:
        """Note which nodes there are now, if there is room."""
        with contextlib.suppress(UsageError):
            self.note()

    def note(self) -> None:
        """Note which nodes there are now. Raises UsageError if the journal has no room for them."""
        if self._kept is None:
            return
        ledger = self._ledger
        with ledger:
            machines = [machine for node, machine in ledger.machines.items() if node not in ledger.resting]
            lost = [node for node in self.lost if node not in ledger.links and node not in ledger.resting]
            self._kept.note(machines=dump_plain(machines), lost=lost, resting=sorted(ledger.resting))

    def lose(self, event: NodeLost, *, is_told: bool) -> None:
        """Note that a node will not come back. `is_told`: else the event is kept for the next client."""
        if self._kept is None or event.will_be_replaced:
            return
        losses = [*self._kept.state.get("losses", ())]
        if not is_told:
            losses.append((event.node, event.reason, time.time()))
        with contextlib.suppress(UsageError):
            self._kept.note(lost=sorted({*self.lost, event.node}), losses=losses)

    def take_losses(self) -> list[NodeLost]:
        """Return the losses that no client was told of, and forget them."""
        losses = [] if self._kept is None else self._kept.state.get("losses", [])
        if not losses or self._kept is None:
            return []
        with contextlib.suppress(UsageError):  # the next client is told again
            self._kept.note(losses=[])
        return [_told_late(*loss) for loss in losses]


def _told_late(node: int, reason: str, at: float) -> NodeLost:
    ago = duration(max(0.0, time.time() - at))
    why = f"{reason}, {ago} ago, while no program had the pool"
    return NodeLost(at=at, node=node, reason=why.removeprefix(", "), will_be_replaced=False)
