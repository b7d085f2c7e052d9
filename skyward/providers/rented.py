"""The cloud protocol: everything that `CloudProvider` needs of an API that rents machines, and its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal, Protocol

from ..core.frozenmap import FrozenMap
from ..core.records import dataclass
from ..values.machine import Offer, PoolSpec

POOL_TAG = "skyward:pool"
JOURNAL_TAG = "skyward:journal"
"""Tag of every resource of a pool, with the id of its journal. Resources without it are never touched."""
OWNER_TAG = "skyward:owner"
ATTEMPT_TAG = "skyward:attempt"
LEASE_TAG = "skyward:lease-s"

State = Literal["pending", "running", "ending", "gone"]
"""State of a machine. pending and running are billed; ending is not; a gone machine never runs again."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A rented machine as the provider describes it. `launched_at`: seconds since the epoch, by its clock."""

    id: str
    state: State
    tags: Mapping[str, str] = field(default_factory=FrozenMap)
    private_ip: str = ""
    public_ip: str = ""
    instance_type: str = ""
    zone: str = ""
    is_spot: bool = False
    launched_at: float = 0.0
    reason: str = ""
    """Why the machine is ending or gone, if the provider says so."""
    is_preempted: bool = False
    """Whether the provider took the machine back."""
    is_refused: bool = False
    """Whether any machine of this account would have ended for the same reason, so that it is no lack of capacity."""

    @property
    def is_billed(self) -> bool:
        return self.state in ("pending", "running")


@dataclass(frozen=True, kw_only=True)
class Host:
    """A running rented machine, with all that its setup needs."""

    node: int
    instance: Instance
    address: str
    username: str
    key_file: str
    known_hosts: str
    """A file of this pool alone, which pins the host keys."""
    ask_host_keys: Callable[[], tuple[str, ...]] = tuple
    """Fetches the host keys that the provider vouches for; empty: none yet. Without them the first contact pins."""
    lease_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for `count` machines of one offer: at least `least` of them, or none.

    `token` makes it unique: repeating a request with the same token never creates more machines.
    """

    pool: str
    token: str
    offer: Offer
    count: int
    least: int
    nodes: int = 1
    """Size of the whole pool, of which this request covers all or a part."""
    lease_s: float
    tags: Mapping[str, str]
    user_data: str = ""
    """Script that the machine runs as root when it boots; never a secret, because every user there can read it."""
    public_key: str = ""

    @property
    def shared_tags(self) -> dict[str, str]:
        """Tags of resources that all machines of the pool share: all tags except the attempt."""
        return {name: value for name, value in self.tags.items() if name != ATTEMPT_TAG}


@dataclass(frozen=True, kw_only=True)
class ApiCall:
    """One request to the provider's API, as it would be sent; "<...>" marks values that only its answers contain."""

    operation: str
    parameters: Mapping[str, Any]


class Cloud(Protocol):
    """An API that rents machines, in one account and one region.

    Every fact about it is on its class. Between calls it keeps only connections and caches, and several threads may
    use it. Each call is one try and returns soon: waits and retries belong to the caller. The class of an error says
    what to do: NoCapacity and QuotaExceeded (try another offer), Throttled (nothing was done, retry), OutcomeUnknown
    (it may have been done), AuthFailed. Any other ProviderError is final.
    """

    name: ClassVar[str]
    credentials: ClassVar[str]
    """Source of the credentials, in words."""
    capabilities: ClassVar[frozenset[str]]
    """Subset of "spot", "idempotent-create" (a repeated token creates one set of machines), "console-host-keys"."""
    minimum_billed_s: ClassVar[float]
    """Shortest time that every machine is billed for, in seconds."""
    settle_s: ClassVar[float]
    """Seconds until `describe` surely lists the machines of a create call, also of one that failed."""
    notices: ClassVar[str]
    """Shell script that each spot machine runs from its boot on. It writes `PREEMPTED_FILE` when the provider
    announces a preemption. Empty: the provider announces nothing."""

    @property
    def username(self) -> str:
        """Login name for ssh; may become root without a password."""
        ...

    def scope(self) -> str:
        """Return account and region. Local state of another scope is refused. Raises AuthFailed."""
        ...

    def offers(self, spec: PoolSpec) -> list[Offer]:
        """List every offer that fits one node of the spec, one per type, zone and kind of rent; in any order."""
        ...

    def plan(self, request: Request) -> list[ApiCall]:
        """Return exactly what `prepare` and `create` would send. Reads, but changes nothing."""
        ...

    def prepare(self, request: Request) -> None:
        """Create the pool's shared resources (network rules, key). Idempotent: finds them by `request.shared_tags`."""
        ...

    def create(self, request: Request) -> list[Instance]:
        """Rent `request.count` machines, or at least `request.least` of them, or none and raise."""
        ...

    def describe(self, tags: Mapping[str, str | None]) -> list[Instance]:
        """List machines that have all of these tags (None: any value). New ones may be missing for `settle_s`."""
        ...

    def terminate(self, ids: Sequence[str]) -> None:
        """Request termination. Gone machines are not an error. Raises Throttled while one cannot be ended yet."""
        ...

    def clean_up(self, tags: Mapping[str, str]) -> list[str]:
        """Delete what `prepare` created for these tags, once the machines are gone; return what must wait."""
        ...

    def shared(self) -> list[dict[str, str]]:
        """Return the tags of every existing resource that `prepare` created."""
        ...

    def host_keys(self, instance_id: str) -> tuple[str, ...]:
        """Return public host keys ("ssh-ed25519 AAAA...") that the provider vouches for; empty if none yet."""
        ...
