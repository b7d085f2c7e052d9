"""The seam of a provider: offers, a plan, machines made and ended."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, cast

from ..events import Emit
from ..values.machine import Gone, Machine, Offer, PoolSpec

__all__ = ["Provider", "RentedProvider", "as_rented", "least_billed_s"]


class Provider(Protocol):
    """A value that makes machines for a pool. Every fact about it is on its class.

    A provider holds no state of a pool: what it made is in the machines' handles. `launch` either returns machines
    whose agents run, or ends what it had begun and raises; `terminate` returns when they are gone and raises naming
    those that are not. Both may be called by several threads for different pools.
    """

    name: ClassVar[str]
    extra: ClassVar[str]
    """The extra of this package that it needs; empty: none."""
    acts_on_image: ClassVar[frozenset[str]]
    """The fields of an Image that it carries out; a pool warns about others that are given."""

    shares_files: ClassVar[bool]
    """Whether a path names the same file here and on a node."""

    is_rented: ClassVar[bool]
    """Whether its machines cost money while they exist, so that what a dead client left is to be looked for.

    If so, it is a `RentedProvider`."""

    def offers(self, spec: PoolSpec) -> list[Offer]:
        """What would fit, cheapest first. Raises NoCapacity if nothing does."""
        ...

    def plan(self, spec: PoolSpec, offer: Offer, pool: str) -> list[Any]:
        """Exactly what `launch` would ask for, without asking for it: one entry for each node."""
        ...

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        """Make the nodes with these indices by the first of the offers that can be had now.

        Raises NoCapacity when none of them can, another ProviderError or NodeError when a machine does not come up.
        """
        ...

    def terminate(self, machines: list[Machine]) -> None:
        """End them and wait until they are gone; those that have ended are no error. Idempotent."""
        ...


class RentedProvider(Provider, Protocol):
    """A provider whose machines cost money: what a pool needs beside, so that none is left and no budget is passed."""

    @property
    def minimum_billed_s(self) -> float:
        """What each machine costs at least, in seconds of its price."""
        ...

    @property
    def ending_s(self) -> float:
        """For so long at most machines cost money after `terminate` was called."""
        ...

    def why_gone(self, machine: Machine) -> Gone | None:
        """Say why a machine is certainly gone; None: it may be there. Raises nothing."""
        ...

    def reaper(self, pool: str) -> tuple[str, ...]:
        """A command of this machine that ends all that was rented for the pool, from any process of this user."""
        ...

    def settle(self, pool: str) -> bool:
        """End whatever of the pool is still there, by the record of it. True: nothing is. Raises TerminateFailed."""
        ...


def as_rented(provider: Provider) -> RentedProvider | None:
    """None: its machines cost nothing."""
    return cast(RentedProvider, provider) if provider.is_rented else None


def least_billed_s(provider: Provider) -> float:
    """What each machine is paid for even if it is given back at once, in seconds; 0 where nothing is rented."""
    rented = as_rented(provider)
    return max(rented.minimum_billed_s, rented.ending_s) if rented is not None else 0.0
