"""One launch of rented machines: offers tried in order, with one intent on disk per create call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any, ClassVar, Protocol

from ..core.interrupts import shielded
from ..core.records import dataclass
from ..errors import MissingDependency, NoCapacity, OutcomeUnknown, ProviderError, QuotaExceeded, Throttled
from ..events import Emit, InstanceLaunched, PhaseEnded, PhaseFailed, PhaseStarted
from ..state.journal import Attempt, Journal
from ..values.machine import Machine, Offer, PoolSpec
from .choice import too_expensive
from .clock import Clock, patiently
from .rented import ATTEMPT_TAG, JOURNAL_TAG, LEASE_TAG, OWNER_TAG, POOL_TAG, Cloud, Host, Instance, Request
from .termination import MachineTermination
from .user_data import boot_script

_CREATE_LIMIT_S = 120.0
"""Seconds during which a throttled create call is retried."""
_CREATE_TRIES = 5
"""Number of times to send a create call whose outcome stays unknown."""
_LOOK_S = 1.0
_SHOWN = 12
"""Most tried offers to list in an error message; its `tried` lists all."""


@dataclass(frozen=True, kw_only=True)
class Rental:
    """Handle of a rented Machine: everything that its termination needs."""

    instance: str
    journal: Journal = field(repr=False)
    emit: Emit = field(repr=False)
    inner: Any = field(default=None, repr=False)
    """Handle from the setup over SSH."""


class Renter(Protocol):
    """Parts of a provider that a launch needs; see CloudProvider."""

    name: ClassVar[str]

    @property
    def lease_s(self) -> float: ...

    @property
    def clock(self) -> Clock: ...

    def cloud(self) -> Cloud: ...

    def ending(
        self, journal: Journal, emit: Emit, nodes: dict[str, int], is_meant: Callable[[str, str], bool]
    ) -> MachineTermination: ...

    def bring_up(self, hosts: list[Host], spec: PoolSpec, pool: str, nodes: list[int], emit: Emit) -> list[Machine]: ...


def request_for(
    renter: Renter,
    spec: PoolSpec,
    offer: Offer,
    pool: str,
    count: int,
    *,
    token: str,
    tags: dict[str, str],
    key: str = "",
    least: int | None = None,
) -> Request:
    """Build the request to the cloud. `least`: fewest machines to accept instead of `count`; None for all or none."""
    lease_s = renter.lease_s
    return Request(
        pool=pool,
        token=token,
        offer=offer,
        count=count,
        least=count if least is None else least,
        nodes=spec.most_nodes,
        lease_s=lease_s,
        tags={POOL_TAG: pool, LEASE_TAG: f"{lease_s:g}", ATTEMPT_TAG: token, **tags},
        user_data=boot_script(lease_s=lease_s, notices=renter.cloud().notices if offer.is_spot else ""),
        public_key=key or "<public key>",
    )


@dataclass
class RentalAttempts:
    """One `launch`. It records its attempts, so that exactly these can be undone."""

    provider: Renter
    spec: PoolSpec
    pool: str
    nodes: list[int]
    emit: Emit
    journal: Journal
    is_stopped: Callable[[], bool]
    """Whether the pool was closed meanwhile."""
    tokens: set[str] = field(default_factory=set)
    node_of: dict[str, int] = field(default_factory=dict)
    _tried: list[str] = field(default_factory=list)
    _over_quota: dict[tuple[str, bool], int] = field(default_factory=dict)
    """Smallest count that exceeded the quota, by type and kind of rent: the quota holds in every zone."""
    _is_only_quota: bool = True

    def __post_init__(self) -> None:
        self._cloud = self.provider.cloud()
        self._clock = self.provider.clock
        self._deadline = self._clock.monotonic() + self.spec.provision_timeout_s
        self._key = _public_key_of(self.journal.folder)

    def run(self, offers: list[Offer]) -> list[Machine]:
        rented = self._rent(offers)
        hosts = [self._host(node, instance) for node, (_, instance) in zip(self.nodes, rented, strict=True)]
        machines = self.provider.bring_up(hosts, self.spec, self.pool, self.nodes, self.emit)
        ids = {host.node: host.instance.id for host in hosts}
        offer_of = {node: offer for node, (offer, _) in zip(self.nodes, rented, strict=True)}
        return [
            replace(
                machine,
                offer=offer_of[machine.node],
                handle=Rental(instance=ids[machine.node], journal=self.journal, emit=self.emit, inner=machine.handle),
            )
            for machine in machines
        ]

    def _rent(self, offers: Sequence[Offer]) -> list[tuple[Offer, Instance]]:
        """Rent a running machine for each node by the first offer that has enough; see `_mixed`.

        Raises:
            NoCapacity: no offer was available; the message lists the tried ones.
        """
        spot_first = self.spec.allocation == "spot-if-available" and len(self.nodes) > 1
        allowed = self._allowed(offers)
        for at, offer in enumerate(allowed):
            is_last_spot_gone = at > 0 and allowed[at - 1].is_spot and not offer.is_spot
            if spot_first and is_last_spot_gone and (mixed := self._mixed(allowed[:at], allowed[at:])):
                return mixed
            if instances := self._tried_by(offer, self.nodes):
                return [(offer, instance) for instance in instances]
        raise self._nothing_had()

    def _nothing_had(self) -> ProviderError:
        shown = self._tried[:_SHOWN] or ["none: max_hourly_cost excludes every offer"]
        if len(self._tried) > _SHOWN:
            shown.append(f"... and {len(self._tried) - _SHOWN} more")
        kind = QuotaExceeded if self._tried and self._is_only_quota else NoCapacity
        return kind(
            f"{self.provider.name}: asked for {len(self.nodes)} machine(s) together in one zone, got 0 from "
            f"{len(self._tried)} offer(s); {_advice(self.spec)}:\n  " + "\n  ".join(shown),
            tried=tuple(self._tried),
        )

    def _mixed(self, spot: Sequence[Offer], on_demand: Sequence[Offer]) -> list[tuple[Offer, Instance]]:
        """Rent what one spot offer has, and the rest on demand, of the same type and in the same zone.

        Used when no spot offer has all machines. Returns [] and leaves nothing behind if no such mix is available.
        """
        twins = {(offer.instance_type, offer.zone): offer for offer in on_demand}
        for offer in spot:
            twin = twins.get((offer.instance_type, offer.zone))
            if twin is None:
                continue
            token = self.journal.next_token  # of the spot attempt below, to undo it if the rest is not available
            got = self._tried_by(offer, self.nodes, least=1)
            if not got:
                continue
            rest = self._tried_by(twin, self.nodes[len(got) :]) if len(got) < len(self.nodes) else []
            if len(got) + len(rest) == len(self.nodes):
                return [*((offer, instance) for instance in got), *((twin, instance) for instance in rest)]
            self._end_attempt(token)
        return []

    def _tried_by(self, offer: Offer, nodes: list[int], least: int | None = None) -> list[Instance]:
        """Rent by this offer; return [] if it has no machines now, and record why."""
        self._check_wanted()
        kind, count = (offer.instance_type, offer.is_spot), len(nodes) if least is None else least
        if count >= self._over_quota.get(kind, count + 1):
            return []
        try:
            return self._rent_by(offer, nodes, least)
        except (NoCapacity, QuotaExceeded) as error:
            self._tried.append(f"{_named(offer)}: {error}")
            if isinstance(error, QuotaExceeded):
                self._over_quota[kind] = count
            else:
                self._is_only_quota = False
            return []

    def _check_wanted(self) -> None:
        if self.is_stopped():
            raise ProviderError(f"{self.provider.name}: pool {self.pool} was closed while it started; open a new one")

    def _allowed(self, offers: Sequence[Offer]) -> list[Offer]:
        """Select offers in the zone of the living machines, within the rest of max_hourly_cost."""
        living = self.journal.living
        zones = {attempt.offer["zone"] for attempt in living.values()}
        spent = sum(float(attempt.offer["price_usd_per_hour"]) for attempt in living.values())
        limit = self.spec.max_hourly_cost
        left = None if limit is None else limit - spent
        return [o for o in offers if (not zones or o.zone in zones) and not too_expensive(o, len(self.nodes), left)]

    def _rent_by(self, offer: Offer, nodes: list[int], least: int | None) -> list[Instance]:
        # On disk before the request leaves. If this process is killed in between, others look for the token.
        attempt = self.journal.begin(offer=_plain(offer), nodes=nodes, at=self._clock.time())
        self.tokens.add(attempt.token)
        request = self._request(offer, attempt, least)
        try:
            self._patient(lambda: self._cloud.prepare(request), OutcomeUnknown)
            made = self._create(request)
        except ProviderError as error:
            # After an unknown outcome machines may exist. The attempt stays open, so that its termination finds them.
            if not isinstance(error, OutcomeUnknown):
                self.journal.settle(attempt.token, [])
            raise
        ids = [instance.id for instance in made]
        self.journal.settle(attempt.token, ids)
        self._announce(offer, ids, nodes)
        try:
            return self._until_running(request, ids)
        except NoCapacity:
            self._end_attempt(attempt.token)
            raise

    def _request(self, offer: Offer, attempt: Attempt, least: int | None) -> Request:
        tags = {JOURNAL_TAG: self.journal.id, OWNER_TAG: self.journal.owner.tag}
        count, token = len(attempt.nodes), attempt.token
        return request_for(
            self.provider, self.spec, offer, self.pool, count, token=token, tags=tags, key=self._key, least=least
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
                instances = self._looked_for(request, error)
                if len(instances) >= request.least:
                    return instances
                # Retry with the same token, so that the cloud cannot create the machines twice.
                if instances or not tries_left or "idempotent-create" not in self._cloud.capabilities:
                    raise
            except (NoCapacity, QuotaExceeded):
                raise  # final: had an earlier try created machines, the same token would have returned them
            except ProviderError as error:
                if unknown is None:
                    raise
                raise OutcomeUnknown(f"{unknown}; and then: {error}") from error  # words: ok, both say what to do
        raise AssertionError("the last try returns or raises")

    def _looked_for(self, request: Request, unknown: OutcomeUnknown) -> list[Instance]:
        """Look for created machines; if that fails too, the outcome stays unknown."""
        try:
            return self._look_for(request)
        except ProviderError as error:
            raise OutcomeUnknown(f"{unknown}; and then: {error}") from error  # words: ok, both say what to do

    def _look_for(self, request: Request) -> list[Instance]:
        """List the machines that a create call made without a readable answer."""
        deadline = self._clock.monotonic() + self._cloud.settle_s
        while True:
            instances = [i for i in self._described(request) if i.is_billed]
            if len(instances) == request.count or self._clock.monotonic() > deadline:
                return instances
            self._clock.sleep(_LOOK_S)

    def _described(self, request: Request) -> list[Instance]:
        tags = {JOURNAL_TAG: self.journal.id, ATTEMPT_TAG: request.token}
        instances: list[Instance] = self._patient(lambda: self._cloud.describe(tags), OutcomeUnknown)
        return instances

    def _announce(self, offer: Offer, ids: list[str], nodes: list[int]) -> None:
        for node, i in zip(nodes, ids, strict=False):
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
            instances = [listed[i] for i in ids if i in listed]
            ended = [i for i in instances if not i.is_billed]
            if ended:
                kind = ProviderError if ended[0].is_refused else NoCapacity
                why = ended[0].reason or "no reason given"
                raise kind(f"{ended[0].id}: ended before it ran ({why}); try another zone or machine type")
            seconds = self._clock.monotonic() - began
            if len(instances) == len(ids) and all(i.state == "running" for i in instances):
                for i in ids:
                    self.emit(PhaseEnded(node=self.node_of[i], phase="boot", seconds=seconds))
                return instances
            if self._clock.monotonic() > self._deadline:
                late = sorted(set(ids) - {i.id for i in instances if i.state == "running"})
                for i in late:
                    self.emit(PhaseFailed(node=self.node_of[i], phase="boot", seconds=seconds, reason="timeout"))
                raise ProviderError(
                    f"{self.provider.name}: {', '.join(late)} did not start within provision_timeout_s="
                    f"{self.spec.provision_timeout_s:g} and were terminated; raise it, or try another zone or type"
                )
            self._clock.sleep(_LOOK_S)

    def _end_attempt(self, token: str) -> None:
        provider = self.provider
        ending = provider.ending(self.journal, self.emit, self.node_of, lambda _id, other: other == token)
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


def _public_key_of(folder: str) -> str:
    """Return the public half of `<folder>/key` ("ssh-ed25519 AAAA..."). Creates the key, mode 0600, if it is missing.

    The key pair belongs to one pool, beside its journal, and is deleted with it. The user's own keys are never sent.

    Raises:
        MissingDependency: the `cryptography` package is not installed.
    """
    try:
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise MissingDependency(
            f"rented machines: need an optional package ({error}); run `pip install 'skyward[ssh]'`", name=error.name
        ) from error
    path = os.path.join(folder, "key")
    if os.path.exists(path):
        with open(path, "rb") as file:
            key = form.load_ssh_private_key(file.read(), password=None)
    else:
        key = Ed25519PrivateKey.generate()
        data = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
        partial = f"{path}.{os.getpid()}"
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    return public.decode("ascii")
