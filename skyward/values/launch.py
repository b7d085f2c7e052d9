"""Launch of a call's processes: everything that happens before the user's code is loaded there."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Literal, Protocol, TypeVar, get_args

from ..core.records import dataclass
from .topology import Rank

RanksPerNode = int | Literal["auto"]
Returns = Literal["nodes", "ranks", "head"]
"""Ranks of a gang whose values the caller gets: the first of each node, all, or only the first of all."""
RETURNS: tuple[Returns, ...] = get_args(Returns)

T = TypeVar("T")


class RankValues(list[T]):
    """List of the values of a gang's ranks, in the order of the ranks; see `returns="ranks"` of the integrations.

    `>> pool` returns that of one node's ranks, `@ pool` that of all ranks. `.local(...)` returns a list of one value.

    Example:
        >>> RankValues([3, 4]) == [3, 4]
        True
    """


class Integration(Protocol):
    """Node half of a framework's support: picklable without the framework, imported lazily on the node.

    A rank first applies `environment`, then calls `prepare`. Both happen before it unpickles the user's function, so
    even an import at the top of the user's module sees their effect. `session` wraps the user's function, in the order
    of the decorators.
    """

    @property
    def name(self) -> str: ...

    @property
    def ranks_per_node(self) -> RanksPerNode:
        """Processes per node; "auto" means one for each accelerator, at least one."""
        ...

    @property
    def returns(self) -> Returns:
        """Ranks whose values the caller gets. With "ranks", each rank returns a list of its one value."""
        ...

    @property
    def sees_neighbours(self) -> bool:
        """Return whether a rank sees the devices of the gang's other ranks on its node, its own at `local_rank`."""
        ...

    @property
    def is_for_head(self) -> bool:
        """Return whether only rank 0 runs the user's function. The other ranks just enter and leave the session."""
        ...

    @property
    def nodes_per_group(self) -> int | None:
        """Return the number of neighbouring nodes whose ranks all integrations see as the whole gang; None: all."""
        ...

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that a node may import once, before it forks ranks. Importing them must start no thread.

        Entries "NAME=value" set a variable first, for modules that read it on import. "NAME?=value" sets it only if it
        is unset.
        """
        ...

    def environment(self, rank: Rank) -> dict[str, str]: ...

    def prepare(self, rank: Rank) -> None: ...

    def session(self, rank: Rank) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, kw_only=True)
class ProcessLaunch:
    """Launch of a call's processes, as plain data.

    A call without integrations runs in a slot that lives as long as the pool. A call with integrations runs as a gang:
    one new process per rank, all started together, which end with the call.
    """

    integrations: tuple[Integration, ...] = ()

    @functools.cached_property  # read for every call
    def is_gang(self) -> bool:
        return bool(self.integrations)

    @property
    def ranks_per_node(self) -> RanksPerNode:
        """Largest number that an integration requests; "auto" wins over 1."""
        requests = [i.ranks_per_node for i in self.integrations]
        numbers = [n for n in requests if n != "auto"]
        most = max(numbers, default=1)
        return "auto" if "auto" in requests and most == 1 else most

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the integrations."""
        return tuple(integration.name for integration in self.integrations)

    @property
    def returns(self) -> Returns:
        """Choice of the one integration that has another than the default."""
        return next((i.returns for i in self.integrations if i.returns != "nodes"), "nodes")

    @property
    def sees_neighbours(self) -> bool:
        """Return whether an integration wants the devices of the gang's other ranks on the node to be visible."""
        return any(i.sees_neighbours for i in self.integrations)

    @property
    def nodes_per_group(self) -> int | None:
        """Choice of the one integration that splits the gang into groups."""
        return next((i.nodes_per_group for i in self.integrations if i.nodes_per_group is not None), None)

    @property
    def preload(self) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for integration in self.integrations:
            names.update(dict.fromkeys(integration.preload))
        # Variables come first and sorted, so that one zygote serves every order of the same decorators.
        return (*sorted(name for name in names if "=" in name), *(name for name in names if "=" not in name))
