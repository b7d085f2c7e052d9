"""The provider protocol: list offers, plan, launch machines and terminate them."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, cast

from ..events import Emit, ignore
from ..values.machine import Gone, Machine, Offer, PoolSpec


class Provider(Protocol):
    """A value that launches machines for a pool. Every fact about a provider is on its class.

    A provider keeps no state about pools: everything it launched is in the machines' handles. `launch` either returns
    machines whose agents run, or terminates what it started and raises. `terminate` returns once the machines are gone
    and raises an error that names any that are not. Several threads may call both at once for different pools.

    `skyward.testing` ships conformance suites that test a provider against this contract.
    `skyward.providers.local.Local` is the shortest complete provider.
    """

    name: ClassVar[str]
    extra: ClassVar[str]
    """Extra of the skyward distribution that the provider needs; empty if none."""
    acts_on_image: ClassVar[frozenset[str]]
    """Names of the `Image` fields that the provider applies; a pool warns when others are set."""

    shares_files: ClassVar[bool]
    """Whether a path names the same file on the client and on a node."""

    is_rented: ClassVar[bool]
    """Whether machines cost money while they exist, so that a dead client's machines must be found and terminated.

    If true, the provider is a `RentedProvider`."""

    def offers(self, spec: PoolSpec) -> list[Offer]:
        """List the offers that fit the spec, cheapest first. Raises NoCapacity if none does."""
        ...

    def plan(self, spec: PoolSpec, offer: Offer, pool: str) -> list[Any]:
        """Return exactly what `launch` would request, one entry per node, without requesting it."""
        ...

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        """Launch the nodes with these indices, using the first offer that is available now.

        Raises:
            NoCapacity: none of the offers is available.
            ProviderError, NodeError: a machine did not come up.
        """
        ...

    def terminate(self, machines: list[Machine]) -> None:
        """Terminate the machines and wait until they are gone. Idempotent: ended machines are not an error."""
        ...


class RentedProvider(Provider, Protocol):
    """A provider whose machines cost money: adds cleanup after a dead client, and the figures a budget needs."""

    @property
    def minimum_billed_s(self) -> float:
        """Shortest time that every machine is billed for, in seconds."""
        ...

    @property
    def ending_s(self) -> float:
        """Longest time that machines still cost money after a call of `terminate`, in seconds."""
        ...

    def why_gone(self, machine: Machine) -> Gone | None:
        """Return why a machine is certainly gone, or None if it may still exist. Never raises."""
        ...

    def reaper(self, pool: str) -> tuple[str, ...]:
        """Return a local command that terminates every machine of the pool, from any process of this user."""
        ...

    def settle(self, pool: str) -> bool:
        """Terminate whatever the journal of the pool still lists; return True if nothing is left.

        Raises:
            TerminateFailed: some machines may still be running.
        """
        ...


class MachineGone(Exception):
    """Reason why the machine of a node is gone for good."""


class DetachableProvider(Provider, Protocol):
    """A provider whose nodes may go on without the client that started them: another process reaches them again."""

    def fields(self) -> dict[str, Any]:
        """Return the arguments that make this provider again, as plain data without secrets."""
        ...

    def describe(self, machine: Machine) -> dict[str, Any]:
        """Return plain data about a node, for `reach`, without secrets."""
        ...

    def reach(self, description: dict[str, Any], emit: Emit = ignore) -> Machine:
        """Connect to a node again that `describe` has described. `emit` receives later events about its machine.

        Raises:
            MachineGone: Its machine is gone for good.
            NodeError, ProviderError: Its machine cannot be logged in to.
        """
        ...

    def leave(self, machines: list[Machine]) -> None:
        """Close the connections of this process to nodes that go on."""
        ...

    def resume(self, pool: str, descriptions: list[dict[str, Any]]) -> None:
        """Learn where the nodes of a pool are that another process has launched, before `launch` replaces some."""
        ...


def as_detachable(provider: Provider) -> DetachableProvider | None:
    """Return the provider as a `DetachableProvider`, or None if its nodes end with their client."""
    return cast(DetachableProvider, provider) if hasattr(provider, "reach") else None


def may_have_head(provider: Provider) -> bool:
    """Return whether a head can run beside the nodes of a provider: other programs than agents run on its machines."""
    return bool(getattr(provider, "has_logins", hasattr(provider, "reach")))


def as_rented(provider: Provider) -> RentedProvider | None:
    """Return the provider as a `RentedProvider`, or None if its machines cost nothing."""
    return cast(RentedProvider, provider) if provider.is_rented else None


def least_billed_s(provider: Provider) -> float:
    """Seconds that every machine is billed for even if it is returned at once; 0 where nothing is rented."""
    rented = as_rented(provider)
    return max(rented.minimum_billed_s, rented.ending_s) if rented is not None else 0.0
