"""The client's machines, as its head asks for them: another one for a lost node, and why one is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..values.machine import Gone, Machine, Machines
from .ledger import Ledger
from .next_head import without_ways


class HeadMachines:
    """Machines of a client. Called on threads of the head's requests.

    Args:
        ledger: Shared state of the client's engine.
        lost: Notes that a node is lost, and which calls it may have run.
    """

    def __init__(self, ledger: Ledger, lost: Callable[[int], object]) -> None:
        self._ledger = ledger
        self._lost = lost
        self.source: Machines | None = None
        """Source of machines; None: there is none."""
        self.verbs: dict[str, Callable[..., Any]] = {
            "replace": self.replace,
            "prepare_replacement": lambda node: self._machines().prepare_replacement(node),
            "give_up": self.give_up,
            "why_gone": self.why_gone,
        }
        """Functions that answer the head's requests, by verb."""

    def replace(self, node: int) -> Machine | None:
        """Return another machine for a lost node, or None if the node is given up. Blocks while it is launched.

        The loss is noted first. If the head is lost during the launch, the next one must know which calls the node may
        have run: it finds a new machine there, which holds none of them.
        """
        self._lost(node)
        machine = self._machines().replace(node)
        with self._ledger:
            if machine is None:
                self._ledger.machines.pop(node, None)
                return None
            self._ledger.machines[node] = machine
        return without_ways(machine)

    def give_up(self, node: int) -> None:
        """Give up a node that could not be replaced."""
        with self._ledger:  # first, so that no Ray is started there anymore
            self._ledger.machines.pop(node, None)
        self._machines().give_up(node)

    def why_gone(self, node: int) -> Gone | None:
        """Return what the source knows about the end of a machine."""
        return self._machines().why_gone(node)

    def _machines(self) -> Machines:
        assert self.source is not None
        return self.source
