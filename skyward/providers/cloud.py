"""Rented machines of every cloud: offers tried in order, nothing left behind. `Cloud` hides the differences.

The order of steps is the contract. An intent is on disk before the request for a machine leaves. Every created resource
carries tags that name the intent. A machine is forgotten only after the cloud reports it gone.
"""

from __future__ import annotations

import abc
import dataclasses
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from ..core.interrupts import shielded
from ..errors import ForeignState, NoCapacity, OutcomeUnknown, ProviderError, Throttled, Unreachable
from ..events import Emit, InstanceTerminated, ignore
from ..state.journal import Attempt, Journal, Owner, journals
from ..values.image import Image
from ..values.machine import PREEMPTED, Gone, Machine, Offer, PoolSpec
from .base import MachineGone
from .choice import in_order, nothing_fits, too_expensive
from .clock import SYSTEM_CLOCK, Clock, patiently
from .rental import Rental, RentalAttempts, request_for
from .rented import JOURNAL_TAG, OWNER_TAG, ApiCall, Cloud, Host
from .termination import MachineTermination


class CloudProvider(abc.ABC):
    """The Provider protocol over a `Cloud`. Subclasses are frozen values that hold the options of one cloud.

    Thread-safe. `skyward.providers.base.Provider` documents the contract of each method.
    """

    name: ClassVar[str]
    extra: ClassVar[str]
    acts_on_image: ClassVar[frozenset[str]] = frozenset(f.name for f in dataclasses.fields(Image))
    shares_files: ClassVar[bool] = False
    is_rented: ClassVar[bool] = True
    has_logins: ClassVar[bool] = True
    """Whether other programs than agents can run on its machines, such as a head."""

    lease_s: float = 600.0

    # Supplied by subclasses -------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def cloud(self) -> Cloud:
        """Return the API. Imports its library on the first call; raises MissingDependency."""

    @abc.abstractmethod
    def fields(self) -> dict[str, Any]:
        """Return plain data that builds an equal provider in another process: `type(self)(**fields)`. No secrets."""

    @property
    def clock(self) -> Clock:
        """Source of time; tests replace it."""
        return SYSTEM_CLOCK

    @property
    def owner(self) -> Owner:
        """Process that owns the machines which this one rents."""
        return Owner.this_process()

    def bring_up(self, hosts: list[Host], spec: PoolSpec, pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        """Start agents on running machines; all or none."""
        from .remote import bring_up_rented  # imports ssh and its dependencies, which only launches need

        return bring_up_rented(hosts, spec, pool, nodes, emit)

    def let_go(self, machines: list[Machine]) -> None:
        """Close the connections of `bring_up` to machines that are gone. Takes the handles that it created."""
        from .remote import let_go

        let_go(machines)

    # The protocol -----------------------------------------------------------------------------------------------------

    def offers(self, spec: PoolSpec) -> list[Offer]:
        """List affordable offers in the order to try them. Raises NoCapacity if there are none."""
        offers = patiently(lambda: self.cloud().offers(spec), again_on=Throttled, clock=self.clock, limit_s=60.0)
        fitting = in_order(offers, spec.allocation)
        if not fitting:
            raise nothing_fits(self.name, spec, offers)
        affordable = [o for o in fitting if not too_expensive(o, spec.nodes, spec.max_hourly_cost)]
        if not affordable:
            cheapest = min(o.price_usd_per_hour for o in fitting)
            raise NoCapacity(
                f"{self.name}: max_hourly_cost={spec.max_hourly_cost:g} USD/h covers the whole pool, but the cheapest "
                f"offer is {cheapest:g} USD/h x {spec.nodes} nodes = {cheapest * spec.nodes:g}; raise it, or request "
                "fewer nodes or a smaller machine"
            )
        return affordable

    def plan(self, spec: PoolSpec, offer: Offer, pool: str) -> list[ApiCall]:
        """Return the API calls that `launch` would send, without sending them."""
        journal = "<journal id>"
        tags = {JOURNAL_TAG: journal, OWNER_TAG: self.owner.tag}
        return self.cloud().plan(request_for(self, spec, offer, pool, spec.nodes, token=f"{journal}-0", tags=tags))

    def why_gone(self, machine: Machine) -> Gone | None:
        """Return why a machine has certainly ended; None if it may run, or if the API does not answer."""
        rental: Rental = machine.handle
        try:
            listed = self.cloud().describe({JOURNAL_TAG: rental.journal.id})
        except ProviderError:  # not proven gone; the caller repeats the query
            return None
        ended = [i for i in listed if i.id == rental.instance and not i.is_billed]
        if not ended:
            return None
        return PREEMPTED if ended[0].is_preempted else Gone(reason=ended[0].reason or "it ended")

    def reaper(self, pool: str) -> tuple[str, ...]:
        """Return the command that terminates all machines of the pool, from any process of this user."""
        return (sys.executable, "-m", "skyward", "down", pool, "--yes")

    @property
    def minimum_billed_s(self) -> float:
        """Shortest time that every machine is billed for, in seconds."""
        return self.cloud().minimum_billed_s

    @property
    def ending_s(self) -> float:
        """Longest time that machines still cost money after `terminate`, in seconds."""
        return 60.0

    def settle(self, pool: str) -> bool:
        """Terminate whatever is left of the pool; return True if nothing is. Raises TerminateFailed."""
        with _registry_lock:
            journal = _registry.get(pool) or _closing.get(pool)
            if journal is not None:
                _stopped.add(journal.id)  # a launch in another thread sees this and creates no more machines
        if journal is not None and journal.is_there:
            shielded(lambda: self._settle(journal))
        return journal is None or not journal.is_there

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        """Rent machines and start their agents; all of them, or none and raise."""
        journal = self._journal(spec, pool)
        try:
            launch = RentalAttempts(
                provider=self,
                spec=spec,
                pool=pool,
                nodes=nodes,
                emit=emit,
                journal=journal,
                is_stopped=lambda: spec.stop.is_set() or journal.id in _stopped,
            )
            try:
                return launch.run(offers)
            except BaseException as error:  # includes KeyboardInterrupt: a failed launch must leave no machine behind
                self._undo(launch, error)
                raise
        finally:
            self._end_launch(journal)

    def terminate(self, machines: list[Machine]) -> None:
        """Terminate the machines and wait until they are gone. Raises TerminateFailed."""
        rentals: dict[str, list[Rental]] = {}
        for machine in machines:
            rentals.setdefault(machine.handle.journal.folder, []).append(machine.handle)
        try:
            for group in rentals.values():
                shielded(lambda group=group: self._end(group))  # type: ignore[misc]
        finally:
            self.let_go([replace(m, handle=m.handle.inner) for m in machines])

    # Nodes that go on without their client ----------------------------------------------------------------------------

    def describe(self, machine: Machine) -> dict[str, Any]:
        """Return what another process of this user needs to reach a node, whose key is beside the journal."""
        from .detached import describe_machine  # imports ssh

        rental: Rental = machine.handle
        own = describe_machine(replace(machine, handle=rental.inner))
        return {**own, "instance": rental.instance, "journal": rental.journal.id}

    def reach(self, description: dict[str, Any], emit: Emit = ignore) -> Machine:
        """Reach a node that `describe` has described. Raises what connecting raises; MachineGone; ForeignState."""
        from .detached import reach_machine

        instance = description["instance"]
        journal = self._known_journal(description["journal"])
        attempt = None if journal is None else journal.living.get(instance)
        over = InstanceTerminated(node=description["node"], instance=instance)
        if journal is None or attempt is None:
            emit(over)
            raise MachineGone(f"its machine {instance} was terminated")
        if why := self._why_over(journal, instance, attempt):
            journal.ended([instance])
            emit(over)
            raise MachineGone(f"its machine {instance} is gone ({why})")
        offer = Offer(provider=self.name, vcpus=0, memory_gib=0.0, **attempt.offer)
        here = _with_files_of(journal, description)
        try:
            machine = reach_machine(here, None)
        except Unreachable:
            self._let_in(journal, attempt, offer)
            machine = reach_machine(here, None)
        rental = Rental(instance=instance, journal=journal, emit=emit, inner=machine.handle)
        return replace(machine, offer=offer, handle=rental)

    def leave(self, machines: list[Machine]) -> None:
        """Close the connections of this process to nodes that go on."""
        self.let_go([replace(m, handle=m.handle.inner) for m in machines])

    def resume(self, pool: str, descriptions: list[dict[str, Any]]) -> None:  # noqa: B027  # complete
        """Do nothing: every node gets a machine of its own."""

    def _known_journal(self, identifier: str) -> Journal | None:
        """Return the journal of another process of this user, so that this one can terminate its machines."""
        journal = next((journal for journal in journals() if journal.id == identifier), None)
        if journal is None:
            return None
        scope = self.cloud().scope()
        if scope != journal.scope:  # there, its machines would look as if they were gone
            raise foreign(self.name, journal, scope)
        with _registry_lock:
            known = _registry.setdefault(journal.pool, journal)
        if known is not journal:  # of an earlier client in this process; others may have rented meanwhile
            known.refresh()
        return known

    def _let_in(self, journal: Journal, attempt: Attempt, offer: Offer) -> None:
        """Let this computer in by SSH, because it may have another address than when the machine was rented."""
        tags = {JOURNAL_TAG: journal.id, OWNER_TAG: journal.owner.tag}
        request = request_for(self, PoolSpec(), offer, journal.pool, 1, token=attempt.token, tags=tags)
        patiently(
            lambda: self.cloud().prepare(request), again_on=(Throttled, OutcomeUnknown), clock=self.clock, limit_s=60.0
        )

    def _why_over(self, journal: Journal, instance: str, attempt: Attempt) -> str:
        """Return why a machine is certainly gone; empty if it may exist."""
        tags = {JOURNAL_TAG: journal.id}
        again_on = (Throttled, OutcomeUnknown)
        cloud = self.cloud()
        listed = patiently(lambda: cloud.describe(tags), again_on=again_on, clock=self.clock, limit_s=60.0)
        found = next((other for other in listed if other.id == instance), None)
        if found is None:  # a new machine might be listed later
            return "it is no longer listed" if self.clock.time() - attempt.at > cloud.settle_s else ""
        if found.is_billed:
            return ""
        return "its provider took it back" if found.is_preempted else found.reason or "it has ended"

    # ------------------------------------------------------------------------------------------------------------------

    def _journal(self, spec: PoolSpec, pool: str) -> Journal:
        """Return the pool's journal, opened by its first launch, and count one launch. Raises ForeignState."""
        scope = self.cloud().scope()  # queries the API, so not under the lock
        with _registry_lock:
            journal = _registry.get(pool)
            if journal is None or not journal.is_there:
                journal = Journal.open_new(
                    pool=pool,
                    provider=self.name,
                    fields=self.fields(),
                    scope=scope,
                    lease_s=self.lease_s,
                    owner=self.owner,
                )
                _registry[pool] = journal
            if journal.scope != scope:
                raise foreign(self.name, journal, scope)
            _under_way[journal.id] = _under_way.get(journal.id, 0) + 1
        return journal

    def _end_launch(self, journal: Journal) -> None:
        with _registry_lock:
            _under_way[journal.id] -= 1
            if not _under_way[journal.id]:
                del _under_way[journal.id]

    def _undo(self, launch: RentalAttempts, error: BaseException) -> None:
        """Terminate the machines of a failed launch. If that fails, add a note; the journal stays open."""
        try:
            shielded(lambda: self._end_all_of(launch))
        except (ProviderError, OSError, KeyboardInterrupt) as failure:
            error.add_note(f"cleanup failed too: {type(failure).__name__}: {failure}")

    def _end_all_of(self, launch: RentalAttempts) -> None:
        with launch.journal.exclusively(restore=True) as is_open:
            if is_open:
                tokens = launch.tokens
                ending = self.ending(launch.journal, launch.emit, launch.node_of, lambda _id, token: token in tokens)
                self._close_if_empty(ending, ending.run(), launches=1)

    def _end(self, rentals: list[Rental]) -> None:
        ids = {rental.instance for rental in rentals}
        journal = rentals[0].journal
        if ids <= journal.gone:
            return
        with journal.exclusively(restore=True):  # a user's `skyward down` may terminate the same machines
            self._end_exclusively(journal, rentals[0].emit, ids)

    def _end_exclusively(self, journal: Journal, emit: Emit, ids: set[str]) -> None:
        nodes = {i: node for a in journal.attempts.values() for i, node in zip(a.ids or (), a.nodes, strict=False)}
        ending = self.ending(journal, emit, nodes, lambda i, _token: i in ids)
        self._close_if_empty(ending, ending.run(), launches=0)

    def _settle(self, journal: Journal) -> None:
        with journal.exclusively() as is_open:
            if is_open:
                ending = self.ending(journal, ignore, {}, lambda _id, _token: True)
                self._close_if_empty(ending, ending.run(), launches=0)

    def ending(
        self, journal: Journal, emit: Emit, nodes: dict[str, int], is_meant: Callable[[str, str], bool]
    ) -> MachineTermination:
        """Build the termination of those machines that `is_meant` selects by id and attempt."""
        return MachineTermination(
            cloud=self.cloud(),
            journal=journal,
            clock=self.clock,
            is_meant=is_meant,
            on_gone=lambda i: emit(InstanceTerminated(node=nodes.get(i, -1), instance=i)),
            command=" ".join(self.reaper(journal.pool)[1:]).replace("-m skyward", "skyward"),
        )

    def _close_if_empty(self, ending: MachineTermination, is_gone: bool, *, launches: int) -> None:
        """Delete the shared resources after the last machine. `launches`: this many launches may be running."""
        journal = ending.journal
        with _registry_lock:
            if not is_gone or journal.living or journal.open_attempts or _under_way.get(journal.id, 0) > launches:
                return
            _registry.pop(journal.pool, None)  # from now on a launch opens a new journal
            _closing[journal.pool] = journal
        try:
            # A create call may have made machines without an answer, and nobody has seen them yet. This is their end.
            self.ending(journal, ignore, {}, lambda i, _token: i not in journal.gone).run()
            ending.clean_up()  # without the lock: it may take minutes, and must not block other pools
        except BaseException:
            with _registry_lock:
                _registry.setdefault(journal.pool, journal)
            raise
        finally:
            with _registry_lock:
                _closing.pop(journal.pool, None)


def _with_files_of(journal: Journal, description: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a node with the paths of this machine, which may have got the journal from another."""
    place = description["place"]
    target = place["target"]
    keys = target["host_keys"]
    if keys["file"]:
        keys = {**keys, "file": f"{journal.folder}/known_hosts"}
    target = {**target, "key_file": f"{journal.folder}/key", "host_keys": keys}
    return {**description, "place": {**place, "target": target}}


# One entry per pool with machines in this process. Locked, because other threads launch replacements.
_registry: dict[str, Journal] = {}
_closing: dict[str, Journal] = {}
"""Journals whose machines are all gone while their shared resources are being deleted."""
_under_way: dict[str, int] = {}
_stopped: set[str] = set()
_registry_lock = threading.RLock()


def foreign(name: str, journal: Journal, scope: str) -> ForeignState:
    return ForeignState(
        f"{name}: pool {journal.pool} belongs to {journal.scope}, but these credentials belong to {scope}, so nothing "
        f"was touched; use the account of the pool, whose record is {journal.folder}",
        recorded=journal.scope,
        current=scope,
    )
