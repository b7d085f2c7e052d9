"""Fake cloud in memory, with the faults of real ones and a clock of its own, for tests of code that rents machines.

    clock = VirtualClock()
    cloud = FakeCloud(clock, faults=FakeFaults(listing_s=20, lost_answers=0.2), seed=7)
    provider = FakeProvider(api=cloud)

It passes the same `ProviderSuite` as the real ones. Everything that takes time there is computed from the clock when a
caller looks: the cost of a machine, for example, or its power-off after nobody has renewed its lease.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar

from ..accelerators import Accelerator
from ..errors import NoCapacity, OutcomeUnknown, ProviderError, Throttled
from ..events import Emit
from ..providers.clock import Clock
from ..providers.cloud import CloudProvider
from ..providers.local import Local
from ..providers.rented import JOURNAL_TAG, ApiCall, Host, Instance, Request
from ..values.machine import Machine, Offer, PoolSpec
from ..values.topology import Peer

_CATALOGUE = (
    Offer(provider="fake", instance_type="small", vcpus=2, memory_gib=4.0, price_usd_per_hour=0.04),
    Offer(provider="fake", instance_type="large", vcpus=16, memory_gib=64.0, price_usd_per_hour=0.70),
    Offer(
        provider="fake",
        instance_type="gpu",
        vcpus=8,
        memory_gib=32.0,
        accelerator=Accelerator("T4", memory="16GB"),
        price_usd_per_hour=0.53,
    ),
)


@dataclass(frozen=True, kw_only=True)
class FakeFaults:
    """Faults of the fake cloud: rates in [0, 1], times in seconds. By default there are none.

    Example:
        cloud = FakeCloud(VirtualClock(), faults=FakeFaults(throttled=0.1, listing_s=20))
    """

    listing_s: float = 0.0
    """Longest time for which `describe` omits a new machine; at most `FakeCloud.settle_s`."""
    stale_s: float = 0.0
    """Greatest age of what `describe` shows."""
    omitted: float = 0.0
    """Rate at which `describe` omits a machine that its previous answer named."""
    boot_s: float = 20.0
    """Time from creation to running."""
    ready_s: float = 10.0
    """Time from running to a machine with a watchdog that accepts logins."""
    never_boots: float = 0.0
    """Rate of machines that run and never become ready: no watchdog, no login."""
    ending_s: float = 15.0
    """Time from the terminate call until the machine is gone."""
    throttled: float = 0.0
    """Rate of calls that are throttled."""
    lost_answers: float = 0.0
    """Rate of create and terminate calls that take effect but answer with an error."""
    lost_requests: float = 0.0
    """Rate of create and terminate calls that answer with the same error and have no effect."""
    is_refused_while_pending: bool = False
    """Whether terminating a pending machine is refused."""
    no_capacity: frozenset[tuple[str, str, bool]] = frozenset()
    """Offers without capacity, as (instance type, zone, is spot)."""
    capacity: Mapping[tuple[str, str, bool], int] = field(default_factory=dict)
    """Total number of machines of an offer; unlimited for offers that are not listed."""


class FakeEnd(Enum):
    """Reason why a machine of the fake cloud ended; the value is the provider's text."""

    ASKED = "terminated by its user"
    LEASE = "powered off when its lease was over"
    PREEMPTED = "taken back"


@dataclass
class FakeServer:
    """Machine of the fake cloud. Times are values of the clock's `monotonic`; None: not yet."""

    id: str
    request: Request
    launched_at: float
    listed_at: float
    running_at: float
    ready_at: float | None
    touched_at: float | None = None
    terminated_at: float | None = None
    gone_at: float | None = None
    end: FakeEnd | None = None
    terminate_calls: int = 0
    """Number of terminate calls that took effect on it; more than one is a bug of the caller."""

    def state(self, now: float) -> Any:
        if self.gone_at is not None and now >= self.gone_at:
            return "gone"
        if self.terminated_at is not None and now >= self.terminated_at:
            return "ending"
        return "running" if now >= self.running_at else "pending"


class FakeCloud:
    """Fake cloud: one account in one region. Thread-safe.

    Args:
        clock: the time of the cloud; share it with the provider.
        faults: faults to inject; may be changed at any time. None: no faults.
        seed: seed of the faults: the same calls meet the same faults.
        zones: names of the zones.
        catalogue: offers of the cloud.
        account: name of the account.

    Example:
        >>> from skyward.testing import VirtualClock
        >>> cloud = FakeCloud(VirtualClock(), zones=("a",))
        >>> len(cloud.offers(PoolSpec(vcpus=16)))
        2
    """

    name: ClassVar[str] = "fake"
    credentials: ClassVar[str] = "none"
    capabilities: ClassVar[frozenset[str]] = frozenset({"spot", "idempotent-create"})
    minimum_billed_s: ClassVar[float] = 60.0
    settle_s: ClassVar[float] = 30.0
    notices: ClassVar[str] = ""
    username: str = "fake"

    def __init__(
        self,
        clock: Clock,
        *,
        faults: FakeFaults | None = None,
        seed: int = 0,
        zones: Sequence[str] = ("a", "b"),
        catalogue: Sequence[Offer] = _CATALOGUE,
        account: str = "fake-account",
    ) -> None:
        self.clock = clock
        self.faults = faults or FakeFaults()
        self.servers: dict[str, FakeServer] = {}
        self.networks: dict[str, dict[str, str]] = {}
        """Tags of prepared networks, by journal id."""
        self.calls: Counter[str] = Counter()
        self.account = account
        self._catalogue = tuple(catalogue)
        self._zones = tuple(zones)
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._made: dict[str, list[str]] = {}
        self._scripted: list[tuple[str, Exception, bool]] = []

    # The Cloud protocol -----------------------------------------------------------------------------------------------

    def scope(self) -> str:
        return f"fake:{self.account}"

    def offers(self, spec: PoolSpec) -> list[Offer]:
        self._enter("offers")
        return [
            replace(offer, zone=zone, region="fake", is_spot=is_spot, price_usd_per_hour=price)
            for offer in self._catalogue
            if _fits(offer, spec)
            for zone in self._zones
            for is_spot, price in ((False, offer.price_usd_per_hour), (True, round(offer.price_usd_per_hour * 0.3, 6)))
        ]

    def plan(self, request: Request) -> list[ApiCall]:
        return [
            ApiCall(operation="Prepare", parameters={"tags": dict(request.shared_tags), "key": request.public_key}),
            ApiCall(
                operation="Create",
                parameters={
                    "type": request.offer.instance_type,
                    "zone": request.offer.zone,
                    "spot": request.offer.is_spot,
                    "count": request.count,
                    "tags": dict(request.tags),
                    "user_data": request.user_data,
                },
            ),
        ]

    def prepare(self, request: Request) -> None:
        self._enter("prepare")
        with self._lock:
            self.networks[request.tags[JOURNAL_TAG]] = dict(request.shared_tags)

    def create(self, request: Request) -> list[Instance]:
        is_carried_out, error = self._enter("create", may_lose=True)
        with self._lock:
            if is_carried_out and request.token not in self._made:
                count = self._granted(request)
                self._made[request.token] = [self._make(request) for _ in range(count)]
            if error is not None:
                raise error
            return [self._shown(self.servers[i]) for i in self._made[request.token]]

    def describe(self, tags: Mapping[str, str | None]) -> list[Instance]:
        self._enter("describe")
        with self._lock:
            self.settle()
            now = self.clock.monotonic()
            stale_s = self._random.random() * self.faults.stale_s
            return [
                self._shown(server, stale_s)
                for server in self.servers.values()
                if now >= server.listed_at and _matches(server.request.tags, tags) and not self._is_omitted()
            ]

    def terminate(self, ids: Sequence[str]) -> None:
        is_carried_out, error = self._enter("terminate", may_lose=True)
        with self._lock:
            self.settle()
            now = self.clock.monotonic()
            known = [self.servers[i] for i in ids if i in self.servers]
            if self.faults.is_refused_while_pending and any(s.state(now) == "pending" for s in known):
                raise Throttled("fake: a pending machine cannot be terminated; retry when it runs")
            for server in known if is_carried_out else ():
                if server.terminated_at is None:
                    self._end(server, now, FakeEnd.ASKED)
                    server.terminate_calls += 1
                elif server.end is FakeEnd.ASKED:
                    server.terminate_calls += 1
            if error is not None:
                raise error

    def clean_up(self, tags: Mapping[str, str]) -> list[str]:
        self._enter("clean_up")
        with self._lock:
            self.settle()
            now = self.clock.monotonic()
            if any(s.state(now) != "gone" and _matches(s.request.tags, tags) for s in self.servers.values()):
                return [f"network of {tags[JOURNAL_TAG]}"]
            self.networks.pop(tags[JOURNAL_TAG], None)
            return []

    def shared(self) -> list[dict[str, str]]:
        self._enter("shared")
        return [dict(tags) for tags in self.networks.values()]

    def host_keys(self, instance_id: str) -> tuple[str, ...]:
        return ()

    # For tests --------------------------------------------------------------------------------------------------------

    def script(self, operation: str, error: Exception, *, is_carried_out: bool = False) -> None:
        """Make the next call of an operation raise `error`, with or without taking effect."""
        self._scripted.append((operation, error, is_carried_out))

    def touch(self, instance_id: str) -> bool:
        """Renew the lease of a machine, as its agent does. Return False if it does not answer."""
        with self._lock:
            self.settle()
            server = self.servers[instance_id]
            if not self.answers(instance_id):
                return False
            server.touched_at = self.clock.monotonic()
            return True

    def answers(self, instance_id: str) -> bool:
        """Return whether the machine has booted and accepts logins."""
        server = self.servers[instance_id]
        now = self.clock.monotonic()
        return server.state(now) == "running" and server.ready_at is not None and now >= server.ready_at

    def reclaim(self, instance_id: str) -> None:
        """Preempt a spot machine now."""
        with self._lock:
            self._end(self.servers[instance_id], self.clock.monotonic(), FakeEnd.PREEMPTED)

    def billed(self) -> list[FakeServer]:
        """Return the machines that cost money now."""
        with self._lock:
            self.settle()
            return [s for s in self.servers.values() if s.state(self.clock.monotonic()) in ("pending", "running")]

    def settle(self) -> None:
        """Apply events since the last look: machines with an expired lease have powered off."""
        now = self.clock.monotonic()
        for server in self.servers.values():
            if server.terminated_at is None and server.ready_at is not None and now >= server.ready_at:
                over = max(server.ready_at, server.touched_at or 0.0) + server.request.lease_s
                if now > over:
                    self._end(server, over, FakeEnd.LEASE)

    # Internals --------------------------------------------------------------------------------------------------------

    def _enter(self, operation: str, *, may_lose: bool = False) -> tuple[bool, Exception | None]:
        """Count a call, and return whether it takes effect and which error it answers with."""
        with self._lock:
            self.calls[operation] += 1
            for entry in self._scripted:
                if entry[0] == operation:
                    self._scripted.remove(entry)
                    if not entry[2]:
                        raise entry[1]
                    return True, entry[1]
            if self._random.random() < self.faults.throttled:
                raise Throttled(f"fake: {operation}: too many requests; retry later")
            if may_lose:
                lost = self._random.random()
                error = OutcomeUnknown(f"fake: {operation}: the connection broke; look for what was created")
                if lost < self.faults.lost_answers:
                    return True, error
                if lost < self.faults.lost_answers + self.faults.lost_requests:
                    return False, error
            return True, None

    def _is_omitted(self) -> bool:
        return self.faults.omitted > 0 and self._random.random() < self.faults.omitted

    def _granted(self, request: Request) -> int:
        """Return how many machines the request gets. Raise NoCapacity if there are too few."""
        offer = request.offer
        if request.tags[JOURNAL_TAG] not in self.networks:
            raise ProviderError("fake: create: the network was not prepared; call prepare() first")
        kind = (offer.instance_type, offer.zone, offer.is_spot)
        if kind in self.faults.no_capacity:
            raise NoCapacity(f"fake: no {offer.instance_type} in zone {offer.zone}; try another")
        if kind not in self.faults.capacity:
            return request.count
        rented = [s.request.offer for s in self.servers.values() if s.state(self.clock.monotonic()) != "gone"]
        left = self.faults.capacity[kind] - sum((o.instance_type, o.zone, o.is_spot) == kind for o in rented)
        if left < request.least:
            raise NoCapacity(f"fake: only {max(0, left)} {offer.instance_type} in zone {offer.zone}; try another")
        return min(left, request.count)

    def _make(self, request: Request) -> str:
        now = self.clock.monotonic()
        faults = self.faults
        running_at = now + faults.boot_s
        boots = self._random.random() >= faults.never_boots
        server = FakeServer(
            id=f"fake-{len(self.servers)}",
            request=request,
            launched_at=now,
            listed_at=now + self._random.random() * min(faults.listing_s, self.settle_s),
            running_at=running_at,
            ready_at=running_at + faults.ready_s if boots else None,
        )
        self.servers[server.id] = server
        return server.id

    def _end(self, server: FakeServer, at: float, end: FakeEnd) -> None:
        if server.terminated_at is None:
            server.terminated_at, server.gone_at, server.end = at, at + self.faults.ending_s, end

    def _shown(self, server: FakeServer, stale_s: float = 0.0) -> Instance:
        number = int(server.id.removeprefix("fake-"))
        return Instance(
            id=server.id,
            state=server.state(self.clock.monotonic() - stale_s),
            tags=dict(server.request.tags),
            private_ip=f"10.0.{number // 250}.{number % 250 + 1}",
            instance_type=server.request.offer.instance_type,
            zone=server.request.offer.zone,
            is_spot=server.request.offer.is_spot,
            launched_at=server.launched_at,
            reason="" if server.end is None else server.end.value,
            is_preempted=server.end is FakeEnd.PREEMPTED,
        )


def _fits(offer: Offer, spec: PoolSpec) -> bool:
    if spec.accelerator is not None:
        has = offer.accelerator
        return has is not None and has.name == spec.accelerator.name and has.count >= spec.accelerator.count
    return (
        offer.accelerator is None
        and offer.vcpus >= (spec.vcpus or 0)
        and offer.memory_gib >= (spec.memory_gib or 0.0)
        and spec.architecture in (None, "x86_64")
    )


def _matches(tags: Mapping[str, str], wanted: Mapping[str, str | None]) -> bool:
    return all(name in tags and value in (None, tags[name]) for name, value in wanted.items())


@dataclass(frozen=True, kw_only=True)
class FakeProvider(CloudProvider):
    """Provider of machines of a `FakeCloud`.

    Args:
        api: the cloud, or an object that wraps one.
        lease_s: lease of a machine, in seconds.
        has_agents: whether its machines run calls, in agents on this machine, so that it supports whole pools. The
            clock must then be a real one (`FastClock`). False: machines are only launched and terminated.

    Example:
        >>> from skyward.testing import VirtualClock
        >>> provider = FakeProvider(api=FakeCloud(VirtualClock()))
        >>> provider.offers(PoolSpec(vcpus=2))[0].instance_type
        'small'
    """

    name: ClassVar[str] = "fake"
    extra: ClassVar[str] = ""
    has_logins: ClassVar[bool] = False

    api: Any
    """The `FakeCloud`, or an object that wraps one."""
    lease_s: float = 600.0
    has_agents: bool = False

    def cloud(self) -> Any:
        return self.api

    @property
    def clock(self) -> Clock:
        clock: Clock = self.api.clock
        return clock

    @property
    def ending_s(self) -> float:
        seconds: float = self.api.faults.ending_s
        return seconds

    def fields(self) -> dict[str, Any]:
        return {"account": self.api.account}

    def let_go(self, machines: list[Machine]) -> None:
        if self.has_agents:
            Local().terminate(machines)

    def bring_up(self, hosts: list[Host], spec: PoolSpec, pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        deadline = self.clock.monotonic() + spec.provision_timeout_s
        for host in hosts:
            while not self.api.touch(host.instance.id):
                if self.clock.monotonic() > deadline:
                    raise ProviderError(f"fake: {host.instance.id} does not answer; raise provision_timeout_s")
                self.clock.sleep(1.0)
        if self.has_agents:
            here = Local()
            return here.launch(spec, here.offers(replace(spec, vcpus=None, memory_gib=None)), pool, nodes, emit)
        return [
            Machine(
                node=host.node,
                socket_path="",
                folder="",
                pid=0,
                peer=Peer(node=host.node, private_ip=host.address),
                slots=spec.concurrency,
                lease_s=host.lease_s,
            )
            for host in hosts
        ]
