"""The seam of a cloud: what `CloudProvider` needs of an API that rents machines. Values and one small protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from ..core.frozenmap import FrozenMap
from ..values.machine import Offer, PoolSpec

__all__ = [
    "ATTEMPT_TAG",
    "JOURNAL_TAG",
    "LEASE_TAG",
    "OWNER_TAG",
    "POOL_TAG",
    "ApiCall",
    "Cloud",
    "Instance",
    "Request",
]

POOL_TAG = "skyward:pool"
JOURNAL_TAG = "skyward:journal"
"""Of everything that is made for a pool: the id of its journal. Nothing without it is ever touched."""
OWNER_TAG = "skyward:owner"
ATTEMPT_TAG = "skyward:attempt"
LEASE_TAG = "skyward:lease-s"

State = Literal["pending", "running", "ending", "gone"]
"""pending and running cost money; ending (shutting down) no longer does; gone: it will never be seen running again."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A rented machine as the provider describes it. `launched_at`: seconds since the epoch by the provider's clock."""

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
    """Why it is ending or gone, where the provider says so."""
    is_preempted: bool = False
    """The provider took it back."""
    is_refused: bool = False
    """It ended for a reason that any other machine of this account would have ended for: no lack of capacity."""

    @property
    def is_billed(self) -> bool:
        return self.state in ("pending", "running")


@dataclass(frozen=True, kw_only=True)
class Host:
    """A rented machine that runs, as who brings it up needs it."""

    node: int
    instance: Instance
    address: str
    username: str
    key_file: str
    known_hosts: str
    """A file of this pool alone, in which its host keys are pinned."""
    ask_host_keys: Callable[[], tuple[str, ...]] = tuple
    """Those that the provider vouches for by now; (): none yet. Without, they are pinned at first contact."""
    lease_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """So many machines of one offer; not fewer than `least`, or none.

    `token` makes it unique: the same token never makes more machines.
    """

    pool: str
    token: str
    offer: Offer
    count: int
    least: int
    nodes: int = 1
    """Of the whole pool, of which these are all or a part."""
    lease_s: float
    tags: Mapping[str, str]
    user_data: str = ""
    """What the machine runs as root when it boots; never a secret: everybody on the machine can read it."""
    public_key: str = ""

    @property
    def shared_tags(self) -> dict[str, str]:
        """For what all machines of the pool share: everything but the attempt."""
        return {name: value for name, value in self.tags.items() if name != ATTEMPT_TAG}


@dataclass(frozen=True, kw_only=True)
class ApiCall:
    """One request to the provider's API, as it would be sent; "<...>" stands for what only its answers will tell."""

    operation: str
    parameters: Mapping[str, Any]


class Cloud(Protocol):
    """An API that rents machines, one account in one region.

    Every fact about it is on its class. It keeps no state between calls but connections and caches; several threads
    may use it. Each call is one try and returns soon: waiting and trying again are the caller's. Errors are told by
    class: NoCapacity and QuotaExceeded (try something else), Throttled (nothing was done, try again), OutcomeUnknown
    (it may have been done), AuthFailed; any other ProviderError is final.
    """

    name: ClassVar[str]
    credentials: ClassVar[str]
    """Where it takes its credentials from, in words."""
    capabilities: ClassVar[frozenset[str]]
    """Of "spot", "idempotent-create" (the same token twice makes one set of machines), "console-host-keys"."""
    minimum_billed_s: ClassVar[float]
    """What each machine costs at least, in seconds of its price."""
    settle_s: ClassVar[float]
    """Seconds after which `describe` shows whatever a create call has made, also one that failed."""
    notices: ClassVar[str]
    """A shell script, run by each spot machine from its boot on, that writes `PREEMPTED_FILE` when the provider
    announces that it takes the machine back; "": it announces nothing."""

    @property
    def username(self) -> str:
        """Who logs in by ssh; may become root without a password."""
        ...

    def scope(self) -> str:
        """Account and region. Local state that names another is refused. Raises AuthFailed."""
        ...

    def offers(self, spec: PoolSpec) -> list[Offer]:
        """Everything that fits one node of the spec, one for each type, zone and kind of rent; in any order."""
        ...

    def plan(self, request: Request) -> list[ApiCall]:
        """Exactly what `prepare` and `create` would send. Reads, but changes nothing."""
        ...

    def prepare(self, request: Request) -> None:
        """Make what the pool's machines share (network rules, key); found by `request.shared_tags`, so idempotent."""
        ...

    def create(self, request: Request) -> list[Instance]:
        """Rent `request.count` machines, or as many as there are but `request.least`, or none and raise."""
        ...

    def describe(self, tags: Mapping[str, str | None]) -> list[Instance]:
        """Those with all of these tags (None: with any value). New ones may be missing for `settle_s` seconds."""
        ...

    def terminate(self, ids: Sequence[str]) -> None:
        """Ask for their end. Those that are gone are no error. Raises Throttled while one cannot be ended yet."""
        ...

    def clean_up(self, tags: Mapping[str, str]) -> list[str]:
        """Remove what `prepare` made for these tags, when the machines are gone; what could not be removed yet."""
        ...

    def shared(self) -> list[dict[str, str]]:
        """The tags of everything that `prepare` made and that is still there."""
        ...

    def host_keys(self, instance_id: str) -> tuple[str, ...]:
        """Public host keys ("ssh-ed25519 AAAA...") that the provider vouches for; () where it knows none yet."""
        ...
