"""The machines of an open pool: what launches them, counts what they cost, replaces those that are lost, ends them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator

from ..engine.keeper import Keeper
from ..engine.opener import ask_to_end
from ..errors import BudgetExceeded, NoCapacity, ProviderError, QuotaExceeded, SkywardError, Unreachable
from ..events import Emit, Event
from ..providers.base import Provider, as_rented, least_billed_s
from ..state.journal import state_folder
from ..values.machine import Gone, Machine, Offer, PoolSpec
from .cost import Spending, affordable

__all__ = ["PoolMachines"]

_log = logging.getLogger(__name__)

_MAX_REPLACEMENTS = 16
_ASK_S = 5.0
"""Seconds to reach a node that is to end, and that perhaps nobody has told so."""
_LAUNCH_PAUSES_S = 1.0, 20.0
"""Before the second try to launch a machine in the place of another, and at most between two."""
_STOP_LAUNCHING_S = 60.0
"""Seconds that a launch gets to end when its pool is closed."""


class PoolMachines:
    """The machines of one pool, from its start to its end; the `Machines` of its engine. Thread-safe.

    The keeper of this process watches each of them from its launch until it is gone. First `launch`, then what the
    engine asks for, at last `stop` and `end`.

    Args:
        pool: its unique name.
        emit: is told what becomes of them, and what they cost.
        on_changed: is called with those that there are, when these are others than before.
        on_overspent: is called once, by a thread of ours, before more is spent than `budget_usd`.
    """

    def __init__(
        self,
        provider: Provider,
        spec: PoolSpec,
        pool: str,
        *,
        budget_usd: float | None,
        emit: Emit,
        on_changed: Callable[[Collection[Machine]], None],
        on_overspent: Callable[[BudgetExceeded], None],
    ) -> None:
        self._provider = provider
        self._rented = as_rented(provider)
        self._spec = spec
        self._pool = pool
        self._budget_usd = budget_usd
        self._tell = emit
        self._on_changed = on_changed
        self._lock = threading.Lock()
        self._is_open = True
        self._changed = threading.Condition()
        self._launching: Counter[int] = Counter()
        """By node: how many threads launch, or wait to launch, a machine in the place of another."""
        self._launch_locks: dict[int, threading.Lock] = {}
        self._offers: list[Offer] = []
        self._machines: dict[int, Machine] = {}
        self._spares: dict[int, Machine] = {}
        """Machines that stand ready for nodes whose machines will be taken."""
        self._left: list[Machine] = []
        """When it has stopped: those that are to be ended."""
        self._replacements = 0
        self._spending: Spending | None = None
        if self._rented is not None:
            self._spending = Spending(
                minimum_s=self._rented.minimum_billed_s,
                ending_s=self._rented.ending_s + spec.cancel_grace_s,
                budget_usd=budget_usd,
                tell=emit,
                stop=on_overspent,
            )

    @property
    def cost_usd(self) -> float:
        """What they have cost until now, by the prices of their offers; 0 where nothing is rented."""
        return 0.0 if self._spending is None else self._spending.spent_usd

    def __iter__(self) -> Iterator[Machine]:
        """Those that nodes run on now."""
        return iter(list(self._machines.values()))

    # Launching ------------------------------------------------------------------------------------------------------

    def launch(self) -> list[Machine]:
        """All of them. Raises ProviderError; then what had been begun is ended."""
        nodes = self._spec.nodes
        self._offers = self._affordable(self._provider.offers(self._spec), nodes, self._budget_usd)
        if self._rented is not None:  # before anything is rented
            reaper, log_path = self._rented.reaper(self._pool), os.path.join(state_folder(), "keeper.log")
            Keeper.of_this_process().guard(self._pool, reaper, log_path=log_path)
        machines = self._launched(list(range(nodes)))
        self._machines = {machine.node: machine for machine in machines}
        self._on_changed(machines)
        for machine in machines:
            Keeper.of_this_process().watch(machine)
        return machines

    def _launched(self, nodes: list[int]) -> list[Machine]:
        offers = self._offers
        if self._spending is not None:
            offers = self._affordable(offers, len(nodes), self._spending.left_usd)
        return self._provider.launch(self._spec, offers, self._pool, nodes, self._emit)

    def _affordable(self, offers: list[Offer], nodes: int, budget_usd: float | None) -> list[Offer]:
        minimum_s = least_billed_s(self._provider)
        return affordable(offers, nodes=nodes, minimum_s=minimum_s, budget_usd=budget_usd)

    def _emit(self, event: Event) -> None:
        if self._spending is not None:
            self._spending.take(event)
        self._tell(event)

    def stop_starting(self) -> None:
        """What `launch` waits for ends under it. Raises TerminateFailed."""
        self._spec.stop.set()
        if self._rented is not None:
            self._rented.settle(self._pool)

    # For the engine -------------------------------------------------------------------------------------------------

    def replace(self, node: int) -> Machine | None:
        with self._launching_one(node):
            machine = self._stand_in(node)
            if machine is None:
                return None
            with self._lock:
                if self._is_open:
                    self._machines[node] = machine
                    self._on_changed(list(self))
                    return machine
            ask_to_end([machine], _ASK_S)  # the pool was closed meanwhile
            self._terminate(machine)
            return None

    def _stand_in(self, node: int) -> Machine | None:
        """The spare, or another; the old one is ended."""
        machine = self._spares.pop(node, None)
        if machine is None:
            self.give_up(node)
        elif (old := self._machines.get(node)) is not None:  # its end may take a minute, and nobody need wait for it
            threading.Thread(target=self._end_old, args=(old,), name="skyward-ending", daemon=True).start()
        self._replacements += 1
        if machine is None:
            if not self._is_open or self._replacements > _MAX_REPLACEMENTS:
                return None
            machine = self._launched_patiently(node)
        return machine

    def prepare_replacement(self, node: int) -> bool:
        with self._launching_one(node):
            if node in self._spares or not self._is_open or self._replacements >= _MAX_REPLACEMENTS:
                return node in self._spares
            try:
                self._spares[node] = self._launched_one(node)
            except (NoCapacity, QuotaExceeded, BudgetExceeded):  # perhaps there is room when the old one is gone
                return False
            return True

    def give_up(self, node: int) -> None:
        old = self._machines.get(node)
        if old is not None:
            self._terminate(old)
            self._machines.pop(node, None)

    def why_gone(self, node: int) -> Gone | None:
        machine = self._machines.get(node)
        return None if self._rented is None or machine is None else self._rented.why_gone(machine)

    @contextlib.contextmanager
    def _launching_one(self, node: int) -> Iterator[None]:
        """One launch at a time for each node; `stop` waits for them."""
        with self._changed:
            self._launching[node] += 1
            lock = self._launch_locks.setdefault(node, threading.Lock())
        try:
            with lock:
                yield
        finally:
            with self._changed:
                self._launching[node] -= 1
                self._changed.notify_all()

    def _launched_patiently(self, node: int) -> Machine:
        """Another machine; where what prevents it may pass, again and again, for as long as machines may take."""
        deadline = time.monotonic() + self._spec.provision_timeout_s
        pause_s, most_s = _LAUNCH_PAUSES_S
        while True:
            try:
                return self._launched_one(node)
            except SkywardError as error:
                is_over = time.monotonic() + pause_s > deadline
                if is_over or not self._may_pass(error) or self._spec.stop.wait(pause_s):
                    raise
            pause_s = min(2 * pause_s, most_s)

    def _launched_one(self, node: int) -> Machine:
        """A machine that the keeper watches."""
        (machine,) = self._launched([node])
        try:
            Keeper.of_this_process().watch(machine)
        except OSError as error:  # the keeper is dead, and there is no process for another
            self._terminate(machine)
            text = f"keeper: cannot be started: {error.strerror}; make room for its process"
            raise ProviderError(text, retryable=True) from error
        return machine

    def _may_pass(self, error: SkywardError) -> bool:
        """Hosts of the user's own do not grow in number or size; a cloud may have more machines in a while."""
        is_lasting = isinstance(error, NoCapacity) and self._rented is None
        is_passing = error.retryable or isinstance(error, QuotaExceeded)  # it was enough for the one that was lost
        is_final = isinstance(error, Unreachable) and error.is_final
        return is_passing and not is_lasting and not is_final

    # Ending ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Launch no more, and wait for what is being launched: who does so ends it. The engine gives up none either."""
        with self._lock:
            self._is_open = False
        self._spec.stop.set()
        with self._changed:
            self._changed.wait_for(lambda: not self._launching.total(), _STOP_LAUNCHING_S)
        self._take_all()

    def _take_all(self) -> None:
        self._left += [*self._machines.values(), *self._spares.values()]
        self._machines.clear()
        self._spares.clear()

    def ask_to_end(self, *, were_told: bool) -> None:
        """Tell the agents to end, if not `were_told`: by the engine, which may not have reached a replacement yet."""
        if not were_told or self._replacements:
            ask_to_end(self._left, _ASK_S)

    def end(self) -> None:
        """Give them back, and all else that was rented for the pool. Raises TerminateFailed, naming what is left."""
        self._take_all()  # `stop` may have been interrupted
        machines = self._left
        try:
            self._provider.terminate(machines)
            if self._rented is not None and self._rented.settle(self._pool):
                Keeper.of_this_process().release(self._pool)  # not before: what is left is the keeper's then
        finally:
            for machine in machines:
                Keeper.of_this_process().forget(machine)

    def _end_old(self, machine: Machine) -> None:
        """In a thread of its own: end one that another stands in for. What is left is ended with the pool."""
        try:
            self._terminate(machine)
        except SkywardError as error:
            _log.error("node %d: its old machine: %s: %s", machine.node, type(error).__name__, error)

    def _terminate(self, machine: Machine) -> None:
        """One of them. Whatever comes of it, its lease is not renewed for ever."""
        try:
            self._provider.terminate([machine])
        finally:
            Keeper.of_this_process().forget(machine)
