"""Every rented machine: offers tried in order, nothing left behind. What differs between clouds is behind `Cloud`.

The order of things is the contract. An intent is on the disk before a machine is asked for; everything asked for
carries tags that name the intent; a machine is forgotten only when the cloud says that it is gone.
"""

from __future__ import annotations

import abc
import dataclasses
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ..errors import ForeignState, NoCapacity, OutcomeUnknown, ProviderError, QuotaExceeded, Throttled
from ..events import Emit, InstanceLaunched, InstanceTerminated, PhaseEnded, PhaseFailed, PhaseStarted, ignore
from ..image import Image
from ..journal import Attempt, Journal, Owner
from ..machine import PREEMPTED, Machine, Offer, PoolSpec
from .choice import in_order, nothing_fits, too_expensive
from .clock import SYSTEM_CLOCK, Clock, patiently
from .ending import Ending, shielded
from .key import public_key_of
from .rented import ATTEMPT_TAG, JOURNAL_TAG, LEASE_TAG, OWNER_TAG, POOL_TAG, ApiCall, Cloud, Host, Instance, Request
from .user_data import boot_script

__all__ = ["CloudProvider", "Rental"]

_CREATE_LIMIT_S = 120.0
"""Seconds that a throttled create call is made again."""
_CREATE_TRIES = 5
"""How often a create call is made whose outcome stays unknown."""
_LOOK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Rental:
    """The handle of a rented Machine: what ends it."""

    instance: str
    journal: Journal = field(repr=False)
    emit: Emit = field(repr=False)
    inner: Any = field(default=None, repr=False)
    """The handle that bring-up gave it."""


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
        from .bring_up import bring_up  # ssh and all it needs: only where machines are made

        return bring_up(hosts, spec, pool, nodes, emit)

    def let_go(self, machines: list[Machine]) -> None:
        """Close what `bring_up` opened to machines that are gone; their handles are those that it gave them."""
        from .bring_up import let_go

        let_go(machines)

    # The protocol -----------------------------------------------------------------------------------------------------

    def offers(self, spec: PoolSpec) -> list[Offer]:
        found = patiently(lambda: self.cloud().offers(spec), again_on=Throttled, clock=self.clock, limit_s=60.0)
        fitting = in_order(found, spec.allocation)
        if not fitting:
            raise nothing_fits(self.name, spec, found)
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
        return self.cloud().plan(self._request(spec, offer, pool, spec.nodes, token="<attempt>", tags={}))

    def why_gone(self, machine: Machine) -> str | None:
        rental: Rental = machine.handle
        try:
            listed = self.cloud().describe({JOURNAL_TAG: rental.journal.id})
        except ProviderError:  # it is asked again
            return None
        found = [i for i in listed if i.id == rental.instance and not i.is_billed]
        if not found:
            return None
        return PREEMPTED if found[0].reason == "spot" else found[0].reason or "it has ended"

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
            journal = _registry.get(pool)
            if journal is not None:
                _stopped.add(journal.id)
        if journal is not None and journal.is_there:
            shielded(lambda: self._settle(journal))
        return journal is None or not journal.is_there

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        journal = self._journal(spec, pool)
        launch = _Launch(provider=self, spec=spec, pool=pool, nodes=nodes, emit=emit, journal=journal)
        with _launching(journal):
            try:
                return launch.run(offers)
            except BaseException as error:  # Ctrl-C too
                self._undo(launch, error)
                raise

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
        """That of this pool, opened with its first launch. Raises ForeignState."""
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
        return journal

    def _request(
        self, spec: PoolSpec, offer: Offer, pool: str, count: int, *, token: str, tags: dict[str, str], key: str = ""
    ) -> Request:
        lease_s = self.lease_s
        return Request(
            pool=pool,
            token=token,
            offer=offer,
            count=count,
            nodes=spec.nodes,
            lease_s=lease_s,
            tags={POOL_TAG: pool, LEASE_TAG: f"{lease_s:g}", ATTEMPT_TAG: token, **tags},
            user_data=boot_script(lease_s=lease_s, is_spot=offer.is_spot),
            public_key=key or "<public key>",
        )

    def _undo(self, launch: _Launch, error: BaseException) -> None:
        """End what a launch that failed has made. A failure of that is a note; the journal stays open."""
        try:
            shielded(lambda: self._end_all_of(launch))
        except (ProviderError, OSError, KeyboardInterrupt) as failure:
            error.add_note(f"and then: {type(failure).__name__}: {failure}")

    def _end_all_of(self, launch: _Launch) -> None:
        ending = self._ending(launch.journal, launch.emit, launch.node_of, lambda _id, token: token in launch.tokens)
        is_gone = ending.run()
        self._close_if_empty(ending, is_gone, launches=1)

    def _end(self, rentals: list[Rental]) -> None:
        ids = {rental.instance for rental in rentals}
        journal = rentals[0].journal
        if ids <= journal.gone:
            return
        with journal.exclusively(restore=True):  # "down", typed by somebody, may be at it too
            self._end_exclusively(journal, rentals[0].emit, ids)

    def _end_exclusively(self, journal: Journal, emit: Emit, ids: set[str]) -> None:
        nodes = {i: node for a in journal.attempts.values() for i, node in zip(a.ids or (), a.nodes, strict=False)}
        ending = self._ending(journal, emit, nodes, lambda i, _token: i in ids)
        self._close_if_empty(ending, ending.run(), launches=0)

    def _settle(self, journal: Journal) -> None:
        with journal.exclusively() as is_open:
            if is_open:
                ending = self._ending(journal, ignore, {}, lambda _id, _token: True)
                self._close_if_empty(ending, ending.run(), launches=0)

    def _ending(
        self, journal: Journal, emit: Emit, nodes: dict[str, int], is_meant: Callable[[str, str], bool]
    ) -> Ending:
        return Ending(
            cloud=self.cloud(),
            journal=journal,
            clock=self.clock,
            is_meant=is_meant,
            on_gone=lambda i: emit(InstanceTerminated(node=nodes.get(i, -1), instance=i)),
            command=" ".join(self.reaper(journal.pool)[1:]).replace("-m skyward", "skyward"),
        )

    def _close_if_empty(self, ending: Ending, is_gone: bool, *, launches: int) -> None:
        """With the last machine goes what they shared. `launches`: how many of this pool may be under way."""
        journal = ending.journal
        with _registry_lock:
            if not is_gone or journal.living or journal.open_attempts or _under_way.get(journal.id, 0) > launches:
                return
            ending.clean_up()
            _registry.pop(journal.pool, None)


# One entry for each pool that this process has machines of; a lock, because replacements are made by other threads.
_registry: dict[str, Journal] = {}
_under_way: dict[str, int] = {}
_stopped: set[str] = set()
_registry_lock = threading.RLock()


class _launching:
    """While a launch is under way, what the machines of the pool share is not removed."""

    def __init__(self, journal: Journal) -> None:
        self._id = journal.id

    def __enter__(self) -> None:
        with _registry_lock:
            _under_way[self._id] = _under_way.get(self._id, 0) + 1

    def __exit__(self, *_: object) -> None:
        with _registry_lock:
            _under_way[self._id] -= 1
            if not _under_way[self._id]:
                del _under_way[self._id]


@dataclass
class _Launch:
    """One `launch`: which attempts it made, so that exactly these are undone."""

    provider: CloudProvider
    spec: PoolSpec
    pool: str
    nodes: list[int]
    emit: Emit
    journal: Journal
    tokens: set[str] = field(default_factory=set)
    node_of: dict[str, int] = field(default_factory=dict)
    _tried: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cloud = self.provider.cloud()
        self._clock = self.provider.clock
        self._deadline = self._clock.monotonic() + self.spec.provision_timeout_s
        self._key = public_key_of(self.journal.folder)

    def run(self, offers: list[Offer]) -> list[Machine]:
        offer, instances = self._rent(offers)
        hosts = [self._host(node, instance) for node, instance in zip(self.nodes, instances, strict=True)]
        machines = self.provider.bring_up(hosts, self.spec, self.pool, self.nodes, self.emit)
        ids = {host.node: host.instance.id for host in hosts}
        return [
            replace(
                machine,
                offer=offer,
                handle=Rental(instance=ids[machine.node], journal=self.journal, emit=self.emit, inner=machine.handle),
            )
            for machine in machines
        ]

    def _rent(self, offers: Sequence[Offer]) -> tuple[Offer, list[Instance]]:
        """Machines that run, by the first offer that can be had. Raises NoCapacity that says what was tried."""
        for offer in self._allowed(offers):
            self._check_wanted()
            try:
                return offer, self._rent_by(offer)
            except (NoCapacity, QuotaExceeded) as error:
                self._tried.append(f"{_named(offer)}: {error}")
        raise NoCapacity(
            f"{self.provider.name}: asked for {len(self.nodes)} machine(s) together in one zone, got 0; tried "
            f"{len(self._tried)} offer(s):\n  "
            + "\n  ".join(self._tried or ["none: max_hourly_cost allows no more"])
            + "\n"
            + _advice(self.spec),
            tried=tuple(self._tried),
        )

    def _check_wanted(self) -> None:
        if self.journal.id in _stopped or self.spec.stop.is_set():
            raise ProviderError(f"{self.provider.name}: pool {self.pool} was ended while it started")

    def _allowed(self, offers: Sequence[Offer]) -> list[Offer]:
        """Beside machines that live, only their zone will do, and what max_hourly_cost leaves."""
        living = self.journal.living
        zones = {attempt.offer["zone"] for attempt in living.values()}
        spent = sum(float(attempt.offer["price_usd_per_hour"]) for attempt in living.values())
        limit = self.spec.max_hourly_cost
        left = None if limit is None else limit - spent
        return [o for o in offers if (not zones or o.zone in zones) and not too_expensive(o, len(self.nodes), left)]

    def _rent_by(self, offer: Offer) -> list[Instance]:
        attempt = self.journal.begin(offer=_plain(offer), nodes=self.nodes, at=self._clock.time())
        self.tokens.add(attempt.token)
        request = self._request(offer, attempt)
        try:
            self._patient(lambda: self._cloud.prepare(request), OutcomeUnknown)
            made = self._create(request)
        except ProviderError as error:
            if not isinstance(error, OutcomeUnknown):
                self.journal.settle(attempt.token, [])
            raise
        ids = [instance.id for instance in made]
        self.journal.settle(attempt.token, ids)
        self._announce(offer, ids)
        try:
            return self._until_running(request, ids)
        except NoCapacity:
            self._end_attempt(attempt.token)
            raise

    def _request(self, offer: Offer, attempt: Attempt) -> Request:
        tags = {JOURNAL_TAG: self.journal.id, OWNER_TAG: self.journal.owner.tag}
        return self.provider._request(
            self.spec, offer, self.pool, len(self.nodes), token=attempt.token, tags=tags, key=self._key
        )

    def _patient(self, call: Callable[[], Any], *again_on: type[ProviderError]) -> Any:
        return patiently(call, again_on=(Throttled, *again_on), clock=self._clock, limit_s=_CREATE_LIMIT_S)

    def _create(self, request: Request) -> list[Instance]:
        unknown: OutcomeUnknown | None = None
        for tries_left in range(_CREATE_TRIES - 1, -1, -1):
            try:
                made: list[Instance] = self._patient(lambda: self._cloud.create(request))
                return made
            except OutcomeUnknown as error:
                unknown = error
                found = self._looked_for(request, error)
                if len(found) == request.count:
                    return found
                # Again with the same token, so that it cannot make them twice.
                if found or not tries_left or "idempotent-create" not in self._cloud.capabilities:
                    raise
            except (NoCapacity, QuotaExceeded):
                raise  # the same token would have answered otherwise, had it made something
            except ProviderError as error:
                if unknown is None:
                    raise
                raise OutcomeUnknown(f"{unknown}; and then: {error}") from error
        raise AssertionError("the last try returns or raises")

    def _looked_for(self, request: Request, unknown: OutcomeUnknown) -> list[Instance]:
        """What `_look_for` finds; where it cannot look, nobody knows still."""
        try:
            return self._look_for(request)
        except ProviderError as error:
            raise OutcomeUnknown(f"{unknown}; and then: {error}") from error

    def _look_for(self, request: Request) -> list[Instance]:
        """What a create call has made that did not say so."""
        deadline = self._clock.monotonic() + self._cloud.settle_s
        while True:
            found = [i for i in self._described(request) if i.is_billed]
            if len(found) == request.count or self._clock.monotonic() > deadline:
                return found
            self._clock.sleep(_LOOK_S)

    def _described(self, request: Request) -> list[Instance]:
        tags = {JOURNAL_TAG: self.journal.id, ATTEMPT_TAG: request.token}
        found: list[Instance] = self._patient(lambda: self._cloud.describe(tags), OutcomeUnknown)
        return found

    def _announce(self, offer: Offer, ids: list[str]) -> None:
        for node, i in zip(self.nodes, ids, strict=True):
            self.node_of[i] = node
            self.emit(
                InstanceLaunched(
                    node=node,
                    instance=i,
                    instance_type=offer.instance_type,
                    price_usd_per_hour=offer.price_usd_per_hour,
                    is_spot=offer.is_spot,
                )
            )
            self.emit(PhaseStarted(node=node, phase="boot", detail=f"{i} {_named(offer)}"))

    def _until_running(self, request: Request, ids: list[str]) -> list[Instance]:
        began = self._clock.monotonic()
        while True:
            self._check_wanted()
            listed = {i.id: i for i in self._described(request)}
            mine = [listed[i] for i in ids if i in listed]
            ended = [i for i in mine if not i.is_billed]
            if ended:
                raise NoCapacity(f"{ended[0].id} ended before it ran ({ended[0].reason or 'no reason given'})")
            seconds = self._clock.monotonic() - began
            if len(mine) == len(ids) and all(i.state == "running" for i in mine):
                for i in ids:
                    self.emit(PhaseEnded(node=self.node_of[i], phase="boot", seconds=seconds))
                return mine
            if self._clock.monotonic() > self._deadline:
                late = sorted(set(ids) - {i.id for i in mine if i.state == "running"})
                for i in late:
                    self.emit(PhaseFailed(node=self.node_of[i], phase="boot", seconds=seconds, reason="timeout"))
                raise ProviderError(
                    f"{self.provider.name}: {', '.join(late)} did not run within provision_timeout_s="
                    f"{self.spec.provision_timeout_s:g}; they were ended. Raise it, or try another zone or type"
                )
            self._clock.sleep(_LOOK_S)

    def _end_attempt(self, token: str) -> None:
        provider = self.provider
        ending = provider._ending(self.journal, self.emit, self.node_of, lambda _id, other: other == token)
        shielded(ending.run)

    def _host(self, node: int, instance: Instance) -> Host:
        return Host(
            node=node,
            instance=instance,
            address=instance.public_ip or instance.private_ip,
            username=self._cloud.username,
            key_file=f"{self.journal.folder}/key",
            known_hosts=f"{self.journal.folder}/known_hosts",
            ask_host_keys=lambda: self._cloud.host_keys(instance.id),
            lease_s=self.journal.lease_s,
        )


def foreign(name: str, journal: Journal, scope: str) -> ForeignState:
    return ForeignState(
        f"{name}: pool {journal.pool} was made in {journal.scope}, and the credentials here are of {scope}; nothing "
        f"was touched. Use the account it was made with; its record is {journal.folder}",
        recorded=journal.scope,
        current=scope,
    )


def _plain(offer: Offer) -> dict[str, Any]:
    return {
        "instance_type": offer.instance_type,
        "zone": offer.zone,
        "region": offer.region,
        "is_spot": offer.is_spot,
        "price_usd_per_hour": offer.price_usd_per_hour,
    }


def _named(offer: Offer) -> str:
    kind = "spot" if offer.is_spot else "on-demand"
    return f"{offer.instance_type} {kind} in {offer.zone or offer.region} at {offer.price_usd_per_hour:g} USD/h"


def _advice(spec: PoolSpec) -> str:
    advice = []
    if spec.allocation == "spot":
        advice.append("allocation='on-demand' or 'spot-if-available'")
    if spec.nodes > 1:
        advice.append("fewer nodes")
    return "try " + ", ".join([*advice, "another region, or other instance types"])
