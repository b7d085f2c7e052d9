"""The client's machines, as its head asks for them: another one for a lost node, and why one is gone."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import SkywardError
from ..values.machine import PREEMPTED, Gone, Machine, Machines
from .ledger import Ledger


class HeadMachines:
    """Machines of a client. Called on threads of the head's requests.

    Args:
        ledger: Shared state of the client's engine.
        lost: Notes that a node is lost, and which calls it may have run.
        replaced: Called with a node, why its former machine is gone, and the seconds since, when it is another machine.
    """

    def __init__(
        self,
        ledger: Ledger,
        lost: Callable[..., object],
        replaced: Callable[[int, Gone, float], object] = lambda node, gone, seconds: None,
    ) -> None:
        self._ledger = ledger
        self._lost = lost
        self._replaced = replaced
        self._heads = 0
        """Number of heads that were told of all machines."""
        self._unknown: dict[int, Machine] = {}
        """Machines that an earlier head has asked for, and the present one does not know."""
        self._locks: dict[int, threading.Lock] = {}
        self._taken: dict[int, Machine | None] = {}
        """Machines that the provider takes back, or has taken back, by node. The node may have another one since."""
        self._relieved: dict[int, Machine | None] = {}
        """Former machines of nodes, of which all outcomes are here. The node may have another one since."""
        self.source: Machines | None = None
        """Source of machines; None: there is none."""
        self.verbs: dict[str, Callable[..., Any]] = {
            "replace": self.replace,
            "prepare_replacement": self.prepare_replacement,
            "relieved": self.note_relieved,
            "give_up": self.give_up,
            "why_gone": self.why_gone,
        }
        """Functions that answer the head's requests, by verb."""

    def told(self) -> list[Machine]:
        """Return the machines as another head gets them. Needs the ledger's lock."""
        self._heads += 1
        self._unknown.clear()
        return [without_ways(machine) for _, machine in sorted(self._ledger.machines.items())]

    def replace(self, node: int) -> Machine | None:
        """Return another machine for a lost node, or None if the node is given up. Blocks while it is launched.

        The loss is noted first. If the head is lost during the launch, the next one must know which calls the node may
        have run: it finds a new machine there, which holds none of them. If it asks for one too, it gets the one that
        is launched already.
        """
        began, is_preempted = time.monotonic(), self.is_taken(node)
        self._lost(node, is_preempted=is_preempted)
        with self._ledger:
            heads, lock = self._heads, self._locks.setdefault(node, threading.Lock())
        with lock:
            machine = self._unknown.pop(node, None)
            if machine is not None and self._ledger.machines.get(node) is machine:
                return without_ways(machine)
            machine = self._machines().replace(node)
            with self._ledger:
                if machine is None:
                    self._ledger.machines.pop(node, None)
                else:
                    self._ledger.machines[node] = machine
                    if self._heads != heads:
                        self._unknown[node] = machine
            gone = PREEMPTED if is_preempted else Gone(reason="its machine was replaced")
            self._replaced(node, gone, time.monotonic() - began)
        return None if machine is None else without_ways(machine)

    def prepare_replacement(self, node: int) -> bool:
        """Launch a spare for a node whose machine will be taken. Return False if there is none now."""
        self._note_taken(node)
        return self._machines().prepare_replacement(node)

    def give_up(self, node: int) -> None:
        """Give up a node that could not be replaced."""
        with self._ledger:  # first, so that no Ray is started there anymore
            self._ledger.machines.pop(node, None)
        self._machines().give_up(node)

    def why_gone(self, node: int) -> Gone | None:
        """Return what the source knows about the end of a machine."""
        try:
            gone = None if self.source is None else self.source.why_gone(node)
        except SkywardError:  # the provider does not answer, which says nothing about the machine
            return None
        if gone is not None and gone.is_preempted:
            self._note_taken(node)
        return gone

    def is_taken(self, node: int) -> bool:
        """Return whether the provider takes back the present machine of a node, or has taken it back."""
        machine = self._ledger.machines.get(node)
        return machine is not None and self._taken.get(node) is machine

    def note_relieved(self, node: int) -> None:
        """Note that all outcomes of a node are here, as the head tells behind them. Next it asks for another."""
        self._relieved[node] = self._ledger.machines.get(node)

    @property
    def relieved(self) -> frozenset[int]:
        """Return the nodes whose present machine the head has relieved. Nothing that is open here has run there."""
        with self._ledger.lock:
            machines = self._ledger.machines
            return frozenset(node for node, machine in machines.items() if self._relieved.get(node) is machine)

    def _note_taken(self, node: int) -> None:
        self._taken[node] = self._ledger.machines.get(node)

    def _machines(self) -> Machines:
        assert self.source is not None
        return self.source


def without_ways(machine: Machine) -> Machine:
    """Return a machine without what only this process can use."""
    return dataclasses.replace(
        machine, channel=(), terminal=(), files=(), dial=None, login=None, offer=None, handle=None
    )
