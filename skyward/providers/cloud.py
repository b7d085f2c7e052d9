"""Every rented machine: offers tried in order, nothing left behind. What differs between clouds is behind `Cloud`.

The order of things is the contract. An intent is on the disk before a machine is asked for; everything asked for
carries tags that name the intent; a machine is forgotten only when the cloud says that it is gone.
"""

from __future__ import annotations

import abc
import dataclasses
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from ..errors import ForeignState, NoCapacity, ProviderError, Throttled
from ..events import Emit, InstanceTerminated, ignore
from ..state.journal import Journal, Owner
from ..values.image import Image
from ..values.machine import PREEMPTED, Gone, Machine, Offer, PoolSpec
from .choice import in_order, nothing_fits, too_expensive
from .clock import SYSTEM_CLOCK, Clock, patiently
from .rental import Rental, RentalAttempts, request_for
from .rented import JOURNAL_TAG, OWNER_TAG, ApiCall, Cloud, Host
from .termination import MachineTermination, shielded

__all__ = ["CloudProvider", "Rental"]


class CloudProvider(abc.ABC):
    """The Provider protocol over a `Cloud`. Subclasses are frozen values that say which cloud, and how to pay.

    Thread-safe. See `skyward.providers.base.Provider` for the contract of each method.
    """

    name: ClassVar[str]
    extra: ClassVar[str]
    acts_on_image: ClassVar[frozenset[str]] = frozenset(f.name for f in dataclasses.fields(Image))
    shares_files: ClassVar[bool] = False
    is_rented: ClassVar[bool] = True

    lease_s: float = 600.0

    # What a subclass gives --------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def cloud(self) -> Cloud:
        """The API. Imports what it needs when it is called first; raises MissingDependency."""

    @abc.abstractmethod
    def fields(self) -> dict[str, Any]:
        """Plain data that makes an equal provider in another process: `type(self)(**fields)`. No secrets."""

    @property
    def clock(self) -> Clock:
        return SYSTEM_CLOCK

    @property
    def owner(self) -> Owner:
        """The process that what it rents belongs to."""
        return Owner.this_process()

    def bring_up(self, hosts: list[Host], spec: PoolSpec, pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        """Agents on machines that run; all or none."""
        from .remote import bring_up_rented  # ssh and all it needs: only where machines are made

        return bring_up_rented(hosts, spec, pool, nodes, emit)

    def let_go(self, machines: list[Machine]) -> None:
        """Close what `bring_up` opened to machines that are gone; their handles are those that it gave them."""
        from .remote import let_go

        let_go(machines)

    # The protocol -----------------------------------------------------------------------------------------------------

    def offers(self, spec: PoolSpec) -> list[Offer]:
        offers = patiently(lambda: self.cloud().offers(spec), again_on=Throttled, clock=self.clock, limit_s=60.0)
        fitting = in_order(offers, spec.allocation)
        if not fitting:
            raise nothing_fits(self.name, spec, offers)
        affordable = [o for o in fitting if not too_expensive(o, spec.nodes, spec.max_hourly_cost)]
        if not affordable:
            cheapest = min(o.price_usd_per_hour for o in fitting)
            raise NoCapacity(
                f"{self.name}: max_hourly_cost={spec.max_hourly_cost:g} USD/h is for the whole pool, and the cheapest "
                f"offer is {cheapest:g} USD/h x {spec.nodes} nodes = {cheapest * spec.nodes:g}; raise it, ask for "
                "fewer nodes or a smaller machine"
            )
        return affordable

    def plan(self, spec: PoolSpec, offer: Offer, pool: str) -> list[ApiCall]:
        journal = "<journal id>"
        tags = {JOURNAL_TAG: journal, OWNER_TAG: self.owner.tag}
        return self.cloud().plan(request_for(self, spec, offer, pool, spec.nodes, token=f"{journal}-0", tags=tags))

    def why_gone(self, machine: Machine) -> Gone | None:
        rental: Rental = machine.handle
        try:
            listed = self.cloud().describe({JOURNAL_TAG: rental.journal.id})
        except ProviderError:  # it is asked again
            return None
        ended = [i for i in listed if i.id == rental.instance and not i.is_billed]
        if not ended:
            return None
        return PREEMPTED if ended[0].is_preempted else Gone(reason=ended[0].reason or "it has ended")

    def reaper(self, pool: str) -> tuple[str, ...]:
        """The command that ends all that was rented for the pool, from any process of this user."""
        return (sys.executable, "-m", "skyward", "down", pool, "--yes")

    @property
    def minimum_billed_s(self) -> float:
        return self.cloud().minimum_billed_s

    @property
    def ending_s(self) -> float:
        return 60.0

    def settle(self, pool: str) -> bool:
        with _registry_lock:
            journal = _registry.get(pool) or _closing.get(pool)
            if journal is not None:
                _stopped.add(journal.id)
        if journal is not None and journal.is_there:
            shielded(lambda: self._settle(journal))
        return journal is None or not journal.is_there

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
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
            except BaseException as error:  # Ctrl-C too
                self._undo(launch, error)
                raise
        finally:
            self._end_launch(journal)

    def terminate(self, machines: list[Machine]) -> None:
        rentals: dict[str, list[Rental]] = {}
        for machine in machines:
            rentals.setdefault(machine.handle.journal.folder, []).append(machine.handle)
        try:
            for group in rentals.values():
                shielded(lambda group=group: self._end(group))  # type: ignore[misc]
        finally:
            self.let_go([replace(m, handle=m.handle.inner) for m in machines])

    # ------------------------------------------------------------------------------------------------------------------

    def _journal(self, spec: PoolSpec, pool: str) -> Journal:
        """That of this pool, opened with its first launch; a launch is under way. Raises ForeignState."""
        scope = self.cloud().scope()
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
        """End what a launch that failed has made. A failure of that is a note; the journal stays open."""
        try:
            shielded(lambda: self._end_all_of(launch))
        except (ProviderError, OSError, KeyboardInterrupt) as failure:
            error.add_note(f"and then: {type(failure).__name__}: {failure}")

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
        with journal.exclusively(restore=True):  # "down", typed by somebody, may be at it too
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
        """What ends those of the journal's machines that are meant, by id and attempt."""
        return MachineTermination(
            cloud=self.cloud(),
            journal=journal,
            clock=self.clock,
            is_meant=is_meant,
            on_gone=lambda i: emit(InstanceTerminated(node=nodes.get(i, -1), instance=i)),
            command=" ".join(self.reaper(journal.pool)[1:]).replace("-m skyward", "skyward"),
        )

    def _close_if_empty(self, ending: MachineTermination, is_gone: bool, *, launches: int) -> None:
        """With the last machine goes what they shared. `launches`: how many of this pool may be under way."""
        journal = ending.journal
        with _registry_lock:
            if not is_gone or journal.living or journal.open_attempts or _under_way.get(journal.id, 0) > launches:
                return
            _registry.pop(journal.pool, None)  # a launch from now on has a journal of its own
            _closing[journal.pool] = journal
        try:
            # What a create call made without saying so, and nobody has seen till now, has no other end than this.
            self.ending(journal, ignore, {}, lambda i, _token: i not in journal.gone).run()
            ending.clean_up()  # not under the lock: it may take minutes, and other pools go on
        except BaseException:
            with _registry_lock:
                _registry.setdefault(journal.pool, journal)
            raise
        finally:
            with _registry_lock:
                _closing.pop(journal.pool, None)


# One entry for each pool that this process has machines of; a lock, because replacements are made by other threads.
_registry: dict[str, Journal] = {}
_closing: dict[str, Journal] = {}
"""Those of which all machines are gone, and what they shared is being removed."""
_under_way: dict[str, int] = {}
_stopped: set[str] = set()
_registry_lock = threading.RLock()


def foreign(name: str, journal: Journal, scope: str) -> ForeignState:
    return ForeignState(
        f"{name}: pool {journal.pool} was made in {journal.scope}, and the credentials here are of {scope}; nothing "
        f"was touched. Use the account it was made with; its record is {journal.folder}",
        recorded=journal.scope,
        current=scope,
    )
