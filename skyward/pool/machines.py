"""Machines of an open pool: launching, counting their cost, replacing lost ones, ending them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import (
    BudgetExceeded,
    NoCapacity,
    PoolClosed,
    ProviderError,
    QuotaExceeded,
    SkywardError,
    Unreachable,
)
from ..events import Emit, Event
from ..providers.base import Provider, as_detachable, as_rented, least_billed_s
from ..values.machine import Gone, Machine, Offer, PoolSpec
from .cost import Spending, affordable

if TYPE_CHECKING:
    from ..engine.keeper import Keeper

_log = logging.getLogger(__name__)

_MAX_REPLACEMENTS = 16
_ASK_S = 5.0
"""Time limit in seconds for reaching a node to end it."""
_LAUNCH_PAUSES_S = 1.0, 20.0
"""First and longest pause between attempts to launch a replacement, in seconds."""
_OFFERS_LAST_S = 300.0
"""Time in seconds after which the prices of rented machines are listed anew."""
_STOP_LAUNCHING_S = 60.0
"""Time limit in seconds for a launch in progress to end when its pool is closed."""


class PoolMachines:
    """Machines of one pool from start to end; the `Machines` of its engine. Thread-safe.

    The keeper of this process watches each machine from its launch until it is gone. First comes `launch`, then
    whatever the engine requests, finally `stop` and `end`.

    Args:
        provider: Source of the machines.
        spec: Request of the pool.
        pool: Unique name of the pool.
        budget_usd: Highest cost; None for no limit.
        emit: Receives events about the machines and their cost.
        on_changed: Called with all current machines whenever they change.
        on_overspent: Called once, in a separate thread, before more than `budget_usd` is spent.
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
        """Node -> number of threads that launch, or wait to launch, a replacement."""
        self._launch_locks: dict[int, threading.Lock] = {}
        self._offers: list[Offer] = []
        self._listed_at = 0.0
        self._machines: dict[int, Machine] = {}
        self._spares: dict[int, Machine] = {}
        """Machines that are ready to replace others that the provider will take."""
        self._ending = 0
        """Threads that end machines which were given back."""
        self._left: list[Machine] = []
        """Machines to end, once no more are launched."""
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
        """Cost so far, by the prices of the offers; 0 if nothing is rented."""
        return 0.0 if self._spending is None else self._spending.spent_usd

    def __iter__(self) -> Iterator[Machine]:
        """Iterate over the machines that nodes run on now."""
        return iter(list(self._machines.values()))

    # Launching ------------------------------------------------------------------------------------------------------

    def launch(self) -> list[Machine]:
        """Launch all machines. Raises ProviderError; then everything that had begun is ended."""
        nodes = self._spec.nodes
        self._offers = self._affordable(self._listed(nodes), nodes, self._budget_usd)
        # The keeper must know the pool before anything is rented: this process may be killed during the launch.
        if self._rented is not None:
            from ..state.journal import state_folder

            reaper, log_path = self._rented.reaper(self._pool), os.path.join(state_folder(), "keeper.log")
            _keeper().guard(self._pool, reaper, log_path=log_path)
        machines = self._launched(list(range(nodes))) if nodes else []
        self._machines = {machine.node: machine for machine in machines}
        self._on_changed(machines)
        _watch(machines)
        return machines

    def _launched(self, nodes: list[int]) -> list[Machine]:
        is_old = self._rented is not None and time.monotonic() - self._listed_at > _OFFERS_LAST_S
        if is_old or not self._offers:  # of an adopted pool, there are none yet
            self._offers = self._listed(len(nodes))
        offers = self._offers
        if self._spending is not None:
            offers = self._affordable(offers, len(nodes), self._spending.left_usd)
        return self._provider.launch(self._spec, offers, self._pool, nodes, self._emit)

    def _listed(self, nodes: int) -> list[Offer]:
        """List the offers for a number of nodes, by whose prices their cost is counted. Other nodes may cost less."""
        spec = dataclasses.replace(self._spec, nodes=nodes, max_nodes=self._spec.most_nodes)
        offers = self._provider.offers(spec)
        self._listed_at = time.monotonic()
        return offers

    def _affordable(self, offers: list[Offer], nodes: int, budget_usd: float | None) -> list[Offer]:
        minimum_s = least_billed_s(self._provider)
        return affordable(offers, nodes=nodes, minimum_s=minimum_s, budget_usd=budget_usd)

    def _emit(self, event: Event) -> None:
        if self._spending is not None:
            self._spending.take(event)
        self._tell(event)

    def stop_starting(self) -> None:
        """End a launch in progress. Raises TerminateFailed."""
        self._spec.stop.set()
        if self._rented is not None:
            self._rented.settle(self._pool)

    def adopt(
        self, reach: Callable[[Emit], list[Machine]], spending: Mapping[str, Any], instances: Collection[str]
    ) -> None:
        """Take machines that another process has launched.

        Args:
            reach: Connects to them. It gets the function that receives their events.
            spending: Their cost so far: what `spending` of that process was.
            instances: Rented machines among them.
        """
        if self._spending is not None:
            self._spending.resume(spending)  # first: it hears of machines that have ended meanwhile
        machines = reach(self._emit)
        if self._spending is not None:
            lease_s = max((machine.lease_s for machine in machines), default=0.0)
            launch_s = self._spec.provision_timeout_s + self._spec.image.bootstrap_timeout_s
            self._spending.keep_only(instances, most_s=launch_s + lease_s)  # its launch over, a lease was not renewed
        self._machines = {machine.node: machine for machine in machines}
        self._on_changed(machines)

    @property
    def spending(self) -> dict[str, Any]:
        """Return the cost so far as plain data, for `adopt`; empty if nothing is rented."""
        return {} if self._spending is None else self._spending.facts()

    @property
    def lasts_alone_s(self) -> float | None:
        """Return for how long the budget lets the machines go on without a client; None for no limit.

        Then their lease ends, and they power themselves off. Both take time, and money.
        """
        if self._spending is None or self._rented is None:
            return None
        return self._spending.lasts_s(max((machine.lease_s for machine in self), default=0.0) + self._rented.ending_s)

    def outlive_client(self) -> None:
        """Let the nodes go on when this process dies. Their head renews their leases instead of the keeper."""
        self.leave_keeper()
        if self._rented is not None:  # last: until then, the keeper returns everything that is rented
            _keeper().release(self._pool)

    def rebuild_by(self, spec: PoolSpec) -> None:
        """Launch replacements by the request of the client that has opened the pool. Call it before any is needed."""
        self._spec = dataclasses.replace(spec, stop=self._spec.stop)

    def stop_replacing(self) -> None:
        """End the launches of replacements, because this process leaves the pool. Later ones may begin."""
        stop, self._spec = self._spec.stop, dataclasses.replace(self._spec, stop=threading.Event())
        stop.set()

    def leave_keeper(self) -> None:
        """Let the keeper watch none of the nodes that are there now."""
        _forget(list(self))

    def leave(self) -> None:
        """Let go of the machines of a detached pool, which go on. One that is still launched is ended."""
        with self._lock:
            self._is_open = False
        self._take_all()
        _forget(self._left)
        source = as_detachable(self._provider)
        if source is not None:
            source.leave(self._left)
        if self._spending is not None:
            self._spending.leave()
        self._left.clear()

    # While the pool is open -----------------------------------------------------------------------------------------

    @property
    def price_usd_per_hour(self) -> float:
        """Price of one more machine: that of the present ones, or of the first offer."""
        present = [machine.offer.price_usd_per_hour for machine in self if machine.offer is not None]
        return max(present, default=self._offers[0].price_usd_per_hour if self._offers else 0.0)

    @property
    def left_usd(self) -> float | None:
        """Rest of the budget; None for no limit."""
        return None if self._spending is None else self._spending.left_usd

    def add(self, nodes: Sequence[int], *, is_patient: bool) -> list[Machine]:
        """Launch machines for further nodes: all of them, or none and raise.

        Args:
            nodes: The nodes.
            is_patient: Whether temporary failures are retried as long as machines may take to start.

        Raises:
            PoolClosed: The pool was closed meanwhile.
            ProviderError: There are no machines.
        """
        with contextlib.ExitStack() as stack:
            for node in sorted(nodes):
                stack.enter_context(self._launching_one(node))
            machines = self._launched_patiently(nodes) if is_patient else self._launched_and_watched(nodes)
            with self._lock:
                if self._is_open:
                    self._machines.update((machine.node, machine) for machine in machines)
                    self._on_changed(list(self))
                    return machines
            # The pool was closed during the launch, so `end` does not know these machines.
            _ask_to_end(machines)
            self._terminate(*machines)
            raise PoolClosed("pool: closed while nodes were added; open a new one")

    def give_back(self, nodes: Sequence[int], *, ended: Callable[[Machine], object] = lambda machine: None) -> None:
        """End the machines of these nodes in a separate thread. If that fails, the pool's end tries again.

        Args:
            nodes: The nodes.
            ended: Called with each machine that has ended.
        """
        with self._lock:
            sources = (self._machines, self._spares)
            old = [machine for node in nodes for source in sources if (machine := source.pop(node, None)) is not None]
            self._left += old
        self._on_changed(list(self))
        if old:
            with self._changed:
                self._ending += 1
            threading.Thread(target=self._end_given_back, args=(old, ended), name="skyward-ending", daemon=True).start()

    def _end_given_back(self, machines: list[Machine], ended: Callable[[Machine], object]) -> None:
        try:
            for machine in machines:
                if self._end_old(machine):
                    with self._lock:
                        self._left = [other for other in self._left if other is not machine]
                    ended(machine)
        finally:
            with self._changed:
                self._ending -= 1
                self._changed.notify_all()

    def wait_ended(self, limit_s: float) -> None:
        """Wait until the machines have ended that were given back, for at most this time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._ending, limit_s)

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
            # The pool was closed during the launch, so `end` does not know this machine.
            _ask_to_end([machine])
            self._terminate(machine)
            return None

    def _stand_in(self, node: int) -> Machine | None:
        """Return the spare machine, or launch another; the old one is ended."""
        machine = self._spares.pop(node, None)
        if machine is None:
            self.give_up(node)
        elif (old := self._machines.get(node)) is not None:  # in a thread: ending a machine may take a minute
            threading.Thread(target=self._end_old, args=(old,), name="skyward-ending", daemon=True).start()
        self._replacements += 1
        if machine is None:
            if not self._is_open or self._replacements > _MAX_REPLACEMENTS:
                return None
            (machine,) = self._launched_patiently([node])
        return machine

    def prepare_replacement(self, node: int) -> bool:
        with self._launching_one(node):
            if node in self._spares or not self._is_open or self._replacements >= _MAX_REPLACEMENTS:
                return node in self._spares
            try:
                (spare,) = self._launched_and_watched([node])
            except (NoCapacity, QuotaExceeded, BudgetExceeded):  # ending the old machine may make room
                return False
            with self._lock:
                is_needed = node in self._machines or not self._is_open  # the end of a pool ends its spares too
                if is_needed:
                    self._spares[node] = spare
            if not is_needed:  # the node was given back meanwhile
                self._terminate(spare)
            return is_needed

    def give_up(self, node: int) -> None:
        old = self._machines.get(node)
        if old is not None:
            self._terminate(old)
            self._machines.pop(node, None)

    def why_gone(self, node: int) -> Gone | None:
        if self._rented is None:
            return None
        machine = self._machines.get(node)
        if machine is None:  # given up, and so terminated
            return Gone(reason="its machine was ended") if self._is_open else None
        return self._rented.why_gone(machine)

    @contextlib.contextmanager
    def _launching_one(self, node: int) -> Iterator[None]:
        """Serialize the launches for one node; `stop` waits for them."""
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

    def _launched_patiently(self, nodes: Sequence[int]) -> list[Machine]:
        """Launch machines. Temporary failures are retried as long as machines may take to start."""
        deadline, stop = time.monotonic() + self._spec.provision_timeout_s, self._spec.stop
        pause_s, most_s = _LAUNCH_PAUSES_S
        while True:
            try:
                return self._launched_and_watched(nodes)
            except SkywardError as error:
                is_over = time.monotonic() + pause_s > deadline
                if is_over or not self._may_pass(error) or stop.wait(pause_s):
                    raise
            pause_s = min(2 * pause_s, most_s)

    def _launched_and_watched(self, nodes: Sequence[int]) -> list[Machine]:
        """Launch machines and let the keeper watch them."""
        machines = self._launched(list(nodes))
        try:
            _watch(machines)
        except OSError as error:  # the keeper died, and no process is left for another
            self._terminate(*machines)
            text = f"keeper: cannot be started: {error.strerror}; free memory or processes for it"
            raise ProviderError(text, retryable=True) from error
        return machines

    def _may_pass(self, error: SkywardError) -> bool:
        """Return whether a failure is temporary. The user's own hosts do not grow; a cloud may have machines later."""
        is_lasting = isinstance(error, NoCapacity) and self._rented is None
        is_passing = error.retryable or isinstance(error, QuotaExceeded)  # the quota sufficed for the lost machine
        is_final = isinstance(error, Unreachable) and error.is_final
        return is_passing and not is_lasting and not is_final

    # Ending ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Launch no more machines, and wait for launches in progress, which end what they get."""
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
        """Ask the agents to end, unless the engine did (`were_told`). It may not have reached a new replacement."""
        if not were_told or self._replacements:
            _ask_to_end(self._left)

    def end(self) -> None:
        """End the machines and all other rented resources of the pool. Raises TerminateFailed, which names the rest."""
        self._take_all()  # again, because `stop` may have been interrupted
        machines = self._left
        try:
            self._provider.terminate(machines)
            if self._rented is not None and self._rented.settle(self._pool):
                # Released only now: if this process dies earlier, the keeper ends the rest.
                _keeper().release(self._pool)
                if self._spending is not None:  # no event tells of machines that were ended while they started
                    self._spending.keep_only(())
        finally:
            _forget(machines)

    def _end_old(self, machine: Machine) -> bool:
        """End an old machine, in a separate thread. If that fails, return False; the pool's end tries again."""
        try:
            self._terminate(machine)
        except SkywardError as error:
            _log.error("node %d: cannot end its old machine: %s: %s", machine.node, type(error).__name__, error)
            return False
        return True

    def _terminate(self, *machines: Machine) -> None:
        """End machines. Their leases are never renewed again, even if this fails."""
        try:
            self._provider.terminate(list(machines))
        finally:
            _forget(machines)


def _keeper() -> Keeper:
    from ..engine.keeper import Keeper  # only here, as pools on this machine have none

    return Keeper.of_this_process()


def _watch(machines: Sequence[Machine]) -> None:
    """Let the keeper watch machines. Nodes on this one watch this process themselves."""
    for machine in machines:
        if machine.channel:
            _keeper().watch(machine)


def _forget(machines: Sequence[Machine]) -> None:
    for machine in machines:
        if machine.channel:
            _keeper().forget(machine)


def _ask_to_end(machines: Sequence[Machine]) -> None:
    from ..engine.opener import ask_to_end  # with the engine, while the machines start

    ask_to_end(machines, _ASK_S)
