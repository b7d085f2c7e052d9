"""Some nodes of a pool as a target of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

from .targets import PoolSender, PoolTarget

if TYPE_CHECKING:
    from .pool import ComputePool


class NodeTarget(PoolTarget):
    """Some nodes of a pool as a target of calls: `f(x) >> pool.node(1)`. Made by a pool; valid while the pool is.

    `>>` and `>` send to one of these nodes, the one with the most room. `@` sends to each, in the order in which they
    were named. A function under an integration runs as a gang on one of them, or on all. `map` and `executor` use only
    their slots.

    Calls wait for these nodes and go to no others. When a node is lost, a call that was already sent to it fails with
    NodeLost, unless its `retries` allow another run. A call that still waits goes to the replacement. If there is no
    replacement, calls that only that node could run fail with NodeLost.

    Example:
        >>> import skyward as sky
        >>> with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        ...     node = pool.node(1)
        ...     sky.compute(lambda: sky.instance_info().node)() >> node
        1
    """

    def __init__(self, pool: ComputePool, sender: PoolSender, label: str) -> None:
        self._pool = pool
        self._sender = sender
        self._label = label

    @property
    def pool(self) -> ComputePool:
        """Pool of these nodes."""
        return self._pool

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the target as a handle, which is a target of calls inside tasks; see `TargetHandle`."""
        from ..node.slot.handle import TargetHandle

        return TargetHandle, (self._pool.job_id, self.node_numbers, False, self._label, self.total_slots)

    def __repr__(self) -> str:
        return f"<{self._label} of {self._pool!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeTarget) and (other._pool is self._pool) and other.node_numbers == self.node_numbers

    def __hash__(self) -> int:
        return hash((id(self._pool), self.node_numbers))


class NodeCount(int):
    """Number of nodes that can also be called: `pool.nodes([0, 2])` selects those two.

    Args:
        count: The number of nodes.
        select: Returns the target of the nodes with these numbers.
    """

    _select: Callable[[Iterable[int]], NodeTarget]

    def __new__(cls, count: int, select: Callable[[Iterable[int]], NodeTarget]) -> Self:
        made = super().__new__(cls, count)
        made._select = select
        return made

    def __call__(self, numbers: Iterable[int]) -> NodeTarget:
        """Return these nodes as a target of calls.

        Args:
            numbers: Indexes of the nodes, each in [0, nodes); at least one, none twice.

        Raises:
            UsageError: A number is illegal.
        """
        return self._select(numbers)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)
