"""Provider that is any of several: it compares their offers in one table and takes machines from one of them.

One entry wins: all nodes of a pool come from it, and so do their replacements. The entries are tried one after the
other, and the next one begins only when nothing of the last one is left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from ..accelerators import Accelerator
from ..core.records import dataclass
from ..errors import (
    AuthFailed,
    MissingDependency,
    NoCapacity,
    QuotaExceeded,
    SkywardError,
    TerminateFailed,
    Throttled,
    Unreachable,
)
from ..events import Emit
from ..values.machine import Gone, Machine, Offer, PoolSpec
from .base import Provider, RentedProvider, as_rented, may_have_head
from .choice import Selection, speed_of

_log = logging.getLogger(__name__)

_TRY_THE_NEXT = (AuthFailed, MissingDependency, NoCapacity, QuotaExceeded, Throttled, Unreachable)
"""Errors of an entry that say nothing about the others. After any other error machines may exist."""
_FULL_S = 300.0
"""Seconds for which an offer that had no machines is tried after all others."""


class FullOffers:
    """Memory of offers that had no machines a while ago. Thread-safe.

    Args:
        keep_s: Seconds for which an offer is remembered.
        now: Clock, in seconds.
    """

    def __init__(self, keep_s: float = _FULL_S, now: Callable[[], float] = time.monotonic) -> None:
        self._keep_s = keep_s
        self._now = now
        self._until: dict[tuple[str, Offer], float] = {}

    def add(self, source: str, offers: Iterable[Offer]) -> None:
        """Remember offers of a source, without their prices, which move."""
        until = self._now() + self._keep_s
        self._until |= {(source, _without_price(offer)): until for offer in offers}

    def has(self, source: str, offer: Offer) -> bool:
        """Return whether an offer had no machines a while ago."""
        return self._until.get((source, _without_price(offer)), 0.0) > self._now()


_full = FullOffers()
"""Memory of this process, which all pools share."""


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """One of several sources of machines: a provider, and the accelerator to request from it if there are several."""

    provider: Provider
    accelerator: Accelerator | None = None

    def request(self, spec: PoolSpec) -> PoolSpec:
        return spec if self.accelerator is None else replace(spec, accelerator=self.accelerator)

    def __str__(self) -> str:
        region = getattr(self.provider, "region", None)
        parts = [self.provider.name, region or "", str(self.accelerator or "")]
        return " ".join(part for part in parts if part)


class _Source(NamedTuple):
    """Origin of a living machine. The handle is kept, so that no other one gets its identity meanwhile."""

    pool: str
    entry: int
    handle: object


class AnyOf:
    """Provider over several entries; see the module. It satisfies `RentedProvider` if any entry is rented. Thread-safe.

    Args:
        entries: The entries, at least one.
        selection: Order of trying: "cheapest" by price, "first" by the order of the entries, "fastest" by the speed of
            the machines.
        full: Memory of offers without machines; None for that of this process.
    """

    extra = ""

    def __init__(self, entries: Sequence[SourceEntry], selection: Selection, full: FullOffers | None = None) -> None:
        self.entries = tuple(entries)
        self.selection = selection
        providers = self._providers = list({id(entry.provider): entry.provider for entry in entries}.values())
        self.name = " or ".join(dict.fromkeys(provider.name for provider in providers))
        self.acts_on_image = frozenset[str]().union(*(provider.acts_on_image for provider in providers))
        self.shares_files = all(provider.shares_files for provider in providers)
        self.is_rented = any(provider.is_rented for provider in providers)
        self.has_logins = all(map(may_have_head, providers))
        self._full = full or _full
        self._lock = threading.Lock()
        self._refusals: dict[int, SkywardError] = {}
        """SourceEntry -> why it had no offers when it was last asked."""
        self._current: dict[str, int] = {}
        """Pool -> the entry that was tried last. While the pool has machines, they come from it."""
        self._sources: dict[int, _Source] = {}
        """Living machines by the identity of their handles, which belong to their providers."""

    def __repr__(self) -> str:
        return f"any of {', '.join(map(str, self.entries))}"

    # Offers -----------------------------------------------------------------------------------------------------------

    def offers(self, spec: PoolSpec) -> list[Offer]:
        """List the offers of all entries in the order to try them. Raises NoCapacity, with each entry's reason."""
        with ThreadPoolExecutor(len(self.entries), thread_name_prefix="skyward-offers") as threads:
            answers = list(threads.map(lambda entry: _offers_of(entry, spec), self.entries))
        refusals = {index: answer for index, answer in enumerate(answers) if isinstance(answer, SkywardError)}
        offers = [
            replace(offer, entry=index)
            for index, answer in enumerate(answers)
            if not isinstance(answer, SkywardError)
            for offer in answer
        ]
        self._refusals = refusals
        if not offers:
            raise self._failure("no entry has a machine that fits", list(refusals.items()))
        return sorted(offers, key=lambda offer: self._rank(offer, spec))

    def _rank(self, offer: Offer, spec: PoolSpec) -> tuple[Any, ...]:
        """Return the sorting key of an offer. Where keys are equal, the entry's own order stays."""
        is_full = self._full.has(repr(self.entries[offer.entry].provider), offer)
        is_second = spec.allocation == "spot-if-available" and not offer.is_spot and offer.price_usd_per_hour > 0
        if self.selection == "first":
            return is_full, offer.entry
        if self.selection == "fastest":
            tflops, vcpus = speed_of(offer, self.entries[offer.entry].accelerator)
            return is_full, -tflops, -vcpus, is_second, offer.price_usd_per_hour, offer.entry
        return is_full, is_second, offer.price_usd_per_hour, offer.entry

    def plan(self, spec: PoolSpec, offer: Offer, pool: str) -> list[Any]:
        """Return what the offer's entry would request."""
        entry = self.entries[offer.entry]
        return entry.provider.plan(entry.request(spec), offer, pool)

    # Machines ---------------------------------------------------------------------------------------------------------

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        """Launch the nodes by the first offers whose entry has all of them.

        A launch of all nodes chooses the entry. While the pool has machines, and for a part of its nodes, it stays.
        """
        if self._has_machines(pool) or (len(nodes) < spec.nodes and pool in self._current):
            chosen = self._current[pool]
            mine = [offer for offer in offers if offer.entry == chosen]
            return self._launch_by(chosen, spec, mine, pool, nodes, emit)
        failures: list[tuple[int, SkywardError]] = []
        for index, group in groupby(offers, key=lambda offer: offer.entry):
            few, entry = list(group), self.entries[index]
            try:
                return self._launch_by(index, spec, few, pool, nodes, emit)
            except _TRY_THE_NEXT as error:
                failures.append((index, error))
                if isinstance(error, NoCapacity | QuotaExceeded):
                    self._full.add(repr(entry.provider), few)
                self._leave(pool, entry, error)
                if spec.stop.is_set():
                    raise
                reason = _reason(entry, error).partition("\n")[0].partition("; ")[0]
                _log.warning("%s: %s has no machines for this pool: %s", pool, entry, reason)
        tried = {index for index, _ in failures}
        failures += [(index, error) for index, error in self._refusals.items() if index not in tried]
        raise self._failure(f"no entry has {len(nodes)} machine(s) together", failures)

    def _launch_by(
        self, index: int, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit
    ) -> list[Machine]:
        entry = self.entries[index]
        self._current[pool] = index  # before the launch: `settle` in another thread ends one that is under way
        machines = entry.provider.launch(entry.request(spec), offers, pool, nodes, emit)
        with self._lock:
            self._sources |= {id(machine.handle): _Source(pool, index, machine.handle) for machine in machines}
        return machines

    def _leave(self, pool: str, entry: SourceEntry, error: SkywardError) -> None:
        """Make sure that nothing of a failed entry is left before another one is tried. Raises its error otherwise."""
        rented = as_rented(entry.provider)
        if rented is None:
            return
        try:
            is_empty = rented.settle(pool)
        except TerminateFailed as failure:
            raise failure from error
        if not is_empty:
            raise error

    def _has_machines(self, pool: str) -> bool:
        with self._lock:
            return any(source.pool == pool for source in self._sources.values())

    def terminate(self, machines: list[Machine]) -> None:
        """Terminate the machines by the provider that launched them. Raises TerminateFailed."""
        by_entry: dict[int, list[Machine]] = {}
        for machine in machines:
            if id(machine.handle) in self._sources:  # otherwise it is gone
                by_entry.setdefault(self._sources[id(machine.handle)].entry, []).append(machine)
        for index, group in by_entry.items():
            self.entries[index].provider.terminate(group)
            with self._lock:
                for machine in group:
                    self._sources.pop(id(machine.handle), None)

    # Rented machines --------------------------------------------------------------------------------------------------

    @property
    def _rented(self) -> list[RentedProvider]:
        return [rented for rented in map(as_rented, self._providers) if rented is not None]

    @property
    def minimum_billed_s(self) -> float:
        """Longest of the shortest billed times, because any entry may win."""
        return max((_or_zero(lambda rented=rented: rented.minimum_billed_s) for rented in self._rented), default=0.0)  # type: ignore[misc]

    @property
    def ending_s(self) -> float:
        """Longest time that machines of any entry still cost money after `terminate`, in seconds."""
        return max((_or_zero(lambda rented=rented: rented.ending_s) for rented in self._rented), default=0.0)  # type: ignore[misc]

    def why_gone(self, machine: Machine) -> Gone | None:
        """Return why a machine is certainly gone, or None if it may still exist."""
        source = self._sources.get(id(machine.handle))
        rented = None if source is None else as_rented(self.entries[source.entry].provider)
        return None if rented is None else rented.why_gone(machine)

    def reaper(self, pool: str) -> tuple[str, ...]:
        """Return the command that terminates the machines of the pool; it finds their provider in the journal."""
        return self._rented[0].reaper(pool)

    def settle(self, pool: str) -> bool:
        """Terminate whatever the pool's last entry still has; nothing of earlier ones is left. Raises TerminateFailed.

        A journal belongs to one provider: another one would not find its machines, and take them for gone.
        """
        index = self._current.get(pool)
        rented = None if index is None else as_rented(self.entries[index].provider)
        return rented is None or rented.settle(pool)

    # Errors -----------------------------------------------------------------------------------------------------------

    def _failure(self, problem: str, failures: list[tuple[int, SkywardError]]) -> SkywardError:
        """Build the error that lists each entry with its reason."""
        kinds = {type(error) for _, error in failures}
        reasons = tuple(f"{self.entries[index]}: {_reason(self.entries[index], error)}" for index, error in failures)
        advice = "add an entry, ask for fewer nodes or less of each, or try again later"
        lines = (reason.replace("\n", "\n  ") for reason in reasons)
        text = "\n  ".join([f"any_of: {problem}; {advice}:", *lines])
        if kinds == {AuthFailed}:
            return AuthFailed(text)
        if kinds == {QuotaExceeded}:
            return QuotaExceeded(text, tried=reasons)
        return NoCapacity(text, tried=reasons)


def _offers_of(entry: SourceEntry, spec: PoolSpec) -> list[Offer] | SkywardError:
    try:
        return entry.provider.offers(entry.request(spec))
    except _TRY_THE_NEXT as error:
        return error


def _reason(entry: SourceEntry, error: SkywardError) -> str:
    """Return the text of an error without the name of its provider, which the name of the entry contains."""
    return str(error).removeprefix(f"{entry.provider.name}: ")


def _or_zero(read: Callable[[], float]) -> float:
    try:
        return read()
    except MissingDependency:  # an entry whose library is missing cannot win
        return 0.0


def _without_price(offer: Offer) -> Offer:
    return replace(offer, price_usd_per_hour=0.0, price_source="", entry=0)
