"""Machines that nobody owns any more: found by the journals of dead owners and by tag, and ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from ..errors import OutcomeUnknown, ProviderError, SkywardError, Throttled
from ..state.journal import Journal, Owner, journals, recently_ended
from . import load
from .clock import patiently
from .cloud import CloudProvider, foreign
from .rented import JOURNAL_TAG, LEASE_TAG, OWNER_TAG, POOL_TAG, Instance
from .termination import MachineTermination

__all__ = ["Found", "gc", "ls", "reap"]

T = TypeVar("T")

ProviderOf = Callable[[Journal], CloudProvider]
IsAlive = Callable[[Owner], bool]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A machine of ours that exists. `owner`: "here" (its process runs), "dead", or "elsewhere" (another machine's)."""

    instance: Instance
    pool: str
    provider: str
    scope: str
    owner: str
    price_usd_per_hour: float | None = None
    """None where no record here tells."""


def reap(pool: str, *, provider_of: ProviderOf | None = None, force: bool = True) -> list[str]:
    """End everything that was rented for the pools of this name by this user on this machine; their ids.

    This is what the keeper runs when a client died, and what `skyward down` does. Safe to run by several processes
    at once, and again: each machine is ended once.

    Args:
        provider_of: makes the provider of a journal; by default from what the journal says.
        force: also where the owner's process still runs. False: such a pool is left alone.

    Raises:
        ForeignState: the credentials here are of another account than the pool's; nothing was touched.
        TerminateFailed: some may still be running; the error names them.
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
) -> tuple[list[str], list[SkywardError]]:
    """End what dead owners left: by their journals, then by tag in the accounts of `providers` and of the journals.

    A machine is ended only when its owner was a process of this machine that is dead and, where no journal tells its
    story, its lease is over. Live pools, and machines of other machines' pools, are never touched.

    Returns the ids that were ended, and what went wrong: one account that cannot be reached does not spare the others.
    """
    ended: list[str] = []
    accounts = _Accounts(providers, provider_of or _provider_of)
    for journal in journals():
        provider = accounts.of(journal)
        if provider is not None and not is_alive(journal.owner):
            with accounts.noting_failures():
                ended += _reap(journal, provider)
    for provider in accounts.all():
        with accounts.noting_failures():
            ended += _reap_by_tag(provider, is_alive)
    return ended, accounts.failures


def ls(
    providers: Iterable[CloudProvider] = (),
    *,
    provider_of: ProviderOf | None = None,
    is_alive: IsAlive = Owner.is_alive,
) -> tuple[list[Found], list[SkywardError]]:
    """Machines of ours that exist, in the accounts of `providers` and of the journals here; and what went wrong."""
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
    """One provider for each account, those that were given first; and what went wrong with them."""

    def __init__(self, given: Iterable[CloudProvider], provider_of: ProviderOf) -> None:
        self.failures: list[SkywardError] = []
        self._provider_of = provider_of
        self._by_scope: dict[str, CloudProvider] = {}
        for provider in given:
            with self.noting_failures():
                self._by_scope.setdefault(provider.cloud().scope(), provider)

    def of(self, journal: Journal) -> CloudProvider | None:
        """The one that a journal is about; None where it cannot be made here, which is noted."""
        if journal.scope not in self._by_scope:
            with self.noting_failures():
                self._by_scope[journal.scope] = self._provider_of(journal)
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
    """End what one journal knows, once, whoever else tries the same."""
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


def _reap_by_tag(provider: CloudProvider, is_alive: IsAlive) -> list[str]:
    """Machines whose journal is lost, and what they shared: the tags say whose they were."""
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
    """Whether the lease of a machine that nobody renews must have ended by now."""
    try:
        lease_s = float(instance.tags.get(LEASE_TAG, ""))
    except ValueError:
        lease_s = 600.0
    age_s = now - instance.launched_at
    # Launched in the future: this machine's clock is wrong, and only the owner's death counts.
    return not instance.is_billed or age_s > lease_s or age_s < -60
