"""Terminates machines without an owner, found by the journals of dead owners and by tag."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

from ..core.records import dataclass
from ..errors import OutcomeUnknown, ProviderError, SkywardError, Throttled
from ..state.journal import Journal, Owner, journals, recently_ended
from . import load
from .clock import patiently
from .cloud import CloudProvider, foreign
from .rented import JOURNAL_TAG, LEASE_TAG, OWNER_TAG, POOL_TAG, Instance
from .termination import MachineTermination

T = TypeVar("T")

ProviderOf = Callable[[Journal], CloudProvider]
IsAlive = Callable[[Owner], bool]
GoesOn = Callable[[str], bool]
"""Whether a pool of this name goes on without the process that has rented its machines."""


def _ends_with_owner(_pool: str) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Found:
    """An existing machine of a pool.

    `owner`: "here" (its process runs), "dead", or "elsewhere" (a process of another machine).
    """

    instance: Instance
    pool: str
    provider: str
    scope: str
    owner: str
    price_usd_per_hour: float | None = None
    """Price of the machine; None if no record on this machine has it."""


def reap(pool: str, *, provider_of: ProviderOf | None = None, force: bool = True) -> list[str]:
    """Terminate everything that this user rented on this machine for the pools of this name; return the ids.

    The keeper runs this when a client died, and so does `skyward down`. Several processes may run it at once, and
    again: each machine is terminated once.

    Args:
        pool: name of the pool.
        provider_of: builds the provider of a journal; by default from the journal itself.
        force: also terminate pools whose owner process still runs. False leaves them alone.

    Raises:
        ForeignState: these credentials belong to another account than the pool; nothing was touched.
        TerminateFailed: some machines may still be running; the error names them.
    """
    ended: list[str] = []
    failures: list[ProviderError] = []
    for journal in journals(pool):
        if not force and journal.owner.is_alive():
            continue
        try:
            ended += _reap(journal, (provider_of or _provider_of)(journal))
        except ProviderError as error:
            failures.append(error)
    if failures:
        for other in failures[1:]:
            failures[0].add_note(str(other))
        raise failures[0]
    return ended


def gc(
    providers: Iterable[CloudProvider] = (),
    *,
    provider_of: ProviderOf | None = None,
    is_alive: IsAlive = Owner.is_alive,
    goes_on: GoesOn = _ends_with_owner,
) -> tuple[list[str], list[SkywardError]]:
    """Terminate what dead owners left: by their journals, then by tag in every known account.

    A machine is terminated only if its owner was a process of this machine that is dead, and its pool does not go on
    without it. If no journal records it, its lease must have expired too. Live pools, and pools of other machines, are
    never touched.

    Args:
        providers: providers whose accounts are searched, besides those of the journals.
        provider_of: builds the provider of a journal; by default from the journal itself.
        is_alive: whether an owner's process runs.
        goes_on: whether a pool whose owner is dead goes on; see `skyward.pool.fleet.goes_on`.

    Returns:
        The terminated ids, and the errors: an unreachable account does not stop the others.
    """
    ended: list[str] = []
    accounts = _Accounts(providers, provider_of or _provider_of)
    for journal in journals():
        provider = accounts.of(journal)
        if provider is not None and not is_alive(journal.owner) and not goes_on(journal.pool):
            with accounts.noting_failures():
                ended += _reap(journal, provider)
    for provider in accounts.all():
        with accounts.noting_failures():
            ended += _reap_by_tag(provider, is_alive, goes_on)
    return ended, accounts.failures


def ls(
    providers: Iterable[CloudProvider] = (),
    *,
    provider_of: ProviderOf | None = None,
    is_alive: IsAlive = Owner.is_alive,
) -> tuple[list[Found], list[SkywardError]]:
    """List existing machines in the accounts of `providers` and of the journals here, and the errors met.

    Args:
        providers: providers whose accounts are searched, besides those of the journals.
        provider_of: builds the provider of a journal; by default from the journal itself.
        is_alive: whether an owner's process runs.
    """
    machines: list[Found] = []
    accounts = _Accounts(providers, provider_of or _provider_of)
    prices: dict[str, float] = {}
    for journal in journals():
        accounts.of(journal)
        prices |= {i: float(a.offer["price_usd_per_hour"]) for i, a in journal.living.items()}
    for provider in accounts.all():
        with accounts.noting_failures():
            scope = provider.cloud().scope()
            machines += [
                _found(instance, provider, scope, prices, is_alive)
                for instance in _described(provider)
                if instance.state != "gone"
            ]
    return sorted(machines, key=lambda f: (f.scope, f.pool, f.instance.id)), accounts.failures


class _Accounts:
    """One provider per account, the given ones first, and the errors met with them."""

    def __init__(self, providers: Iterable[CloudProvider], provider_of: ProviderOf) -> None:
        self.failures: list[SkywardError] = []
        self._provider_of = provider_of
        self._by_scope: dict[str, CloudProvider] = {}
        for provider in providers:
            with self.noting_failures():
                self._by_scope.setdefault(provider.cloud().scope(), provider)

    def of(self, journal: Journal) -> CloudProvider | None:
        """Return the provider of a journal; None if its account cannot be used here, which is recorded as a failure."""
        if journal.scope not in self._by_scope:
            with self.noting_failures():
                provider = self._provider_of(journal)
                scope = provider.cloud().scope()
                self._by_scope.setdefault(scope, provider)
                if scope != journal.scope:
                    raise foreign(provider.name, journal, scope)
        return self._by_scope.get(journal.scope)

    def all(self) -> list[CloudProvider]:
        return list(self._by_scope.values())

    @contextlib.contextmanager
    def noting_failures(self) -> Iterator[None]:
        try:
            yield
        except SkywardError as error:
            self.failures.append(error)


def _described(provider: CloudProvider) -> list[Instance]:
    cloud = provider.cloud()
    return _patiently(provider, lambda: cloud.describe({JOURNAL_TAG: None}))


def _patiently(provider: CloudProvider, call: Callable[[], T]) -> T:
    return patiently(call, again_on=(Throttled, OutcomeUnknown), clock=provider.clock, limit_s=60.0)


def _found(
    instance: Instance, provider: CloudProvider, scope: str, living: dict[str, float], is_alive: IsAlive
) -> Found:
    owner = Owner.from_tag(instance.tags.get(OWNER_TAG, ""))
    state = "elsewhere" if owner is None or not owner.is_here else "here" if is_alive(owner) else "dead"
    return Found(
        instance=instance,
        pool=instance.tags.get(POOL_TAG, ""),
        provider=provider.name,
        scope=scope,
        owner=state,
        price_usd_per_hour=living.get(instance.id),
    )


def _provider_of(journal: Journal) -> CloudProvider:
    return cast(CloudProvider, cast(Any, load(journal.provider))(**journal.fields))


def _reap(journal: Journal, provider: CloudProvider) -> list[str]:
    """Terminate the machines of one journal, once, even if other processes try the same."""
    with journal.exclusively() as is_open:
        if not is_open:
            return []
        scope = provider.cloud().scope()
        if scope != journal.scope:
            raise foreign(provider.name, journal, scope)
        gone: list[str] = []
        ending = MachineTermination(
            cloud=provider.cloud(),
            journal=journal,
            clock=provider.clock,
            on_gone=gone.append,
            command=f"skyward down {journal.pool} --yes",
        )
        if ending.run():
            ending.clean_up()
        return gone


def _reap_by_tag(provider: CloudProvider, is_alive: IsAlive, goes_on: GoesOn) -> list[str]:
    """Terminate machines and shared resources whose journal is lost; their tags name the owner."""
    cloud = provider.cloud()
    recorded = {journal.id for journal in journals()} | recently_ended(provider.clock.time())
    instances = [i for i in _described(provider) if i.tags[JOURNAL_TAG] not in recorded and i.state != "gone"]
    now = provider.clock.time()
    kept = {i.tags[JOURNAL_TAG] for i in instances if not _is_over(i, now)}
    tags_of: dict[str, Mapping[str, str]] = {i.tags[JOURNAL_TAG]: i.tags for i in instances}
    for shared in _patiently(provider, cloud.shared):
        if shared[JOURNAL_TAG] not in recorded:
            tags_of.setdefault(shared[JOURNAL_TAG], shared)
    ended: list[str] = []
    for identifier, tags in tags_of.items():
        owner = Owner.from_tag(tags.get(OWNER_TAG, ""))
        if owner is None or not owner.is_here or is_alive(owner) or identifier in kept:
            continue
        if goes_on(tags.get(POOL_TAG, "")):
            continue
        journal = Journal.open_new(
            id=identifier,
            pool=tags.get(POOL_TAG, "lost"),
            provider=provider.name,
            fields=provider.fields(),
            scope=cloud.scope(),
            owner=owner,
        )
        ended += _reap(journal, provider)
    return ended


def _is_over(instance: Instance, now: float) -> bool:
    """Return whether the lease of a machine that nobody renews must have expired by now."""
    try:
        lease_s = float(instance.tags.get(LEASE_TAG, ""))
    except ValueError:
        lease_s = 600.0
    age_s = now - instance.launched_at
    # A launch in the future means that this machine's clock is wrong. Then only the owner's death counts.
    return not instance.is_billed or age_s > lease_s or age_s < -60
