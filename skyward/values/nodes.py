"""Number of nodes of a pool, as users write it: a fixed number, or bounds between which it grows and shrinks."""

from __future__ import annotations

from ..core.records import dataclass
from ..core.signatures import checked_options
from ..errors import UsageError


@checked_options
@dataclass(frozen=True)
class Nodes:
    """Bounds of an elastic pool: `sky.ComputePool(..., nodes=sky.Nodes(2, max=8))`, or `nodes=(2, 8)` for short.

    The pool starts with `desired` nodes. It grows up to `max` while calls wait, and gives idle nodes back down to
    `min`. With `min=0`, an idle pool has no nodes, and the next call starts one.

    Args:
        min: Fewest nodes, >= 0.
        desired: Nodes at the start, in [min, max]; None for `min`.
        max: Most nodes, >= 1.

    Raises:
        UsageError: A number is illegal; the message names it.

    Example:
        >>> Nodes(2, max=8)
        Nodes(min=2, desired=2, max=8)
    """

    min: int
    desired: int | None = None
    max: int = 0

    def __post_init__(self) -> None:
        if not self.max:
            object.__setattr__(self, "max", max(self.min, 1 if self.desired is None else self.desired))
        if self.desired is None:
            object.__setattr__(self, "desired", self.min)
        for field, least in (("min", 0), ("desired", 0), ("max", 1)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise _refusal(field, value, _at_least(field, least))
        if self.min > self.max:
            raise _refusal("min", self.min, f"exceeds max={self.max}; swap the two, or raise max")
        if not self.min <= self.start <= self.max:
            raise _refusal("desired", self.desired, f"outside min and max; set {self.min} to {self.max}")

    @property
    def start(self) -> int:
        """Nodes at the start."""
        return self.min if self.desired is None else self.desired

    @property
    def is_fixed(self) -> bool:
        """Return whether the number never changes."""
        return self.min == self.max

    @classmethod
    def of(cls, nodes: int | tuple[int, int] | Nodes) -> Nodes:
        """Return the bounds that users write as a number, as (min, max) or as Nodes. Raises UsageError."""
        if isinstance(nodes, Nodes):
            return nodes
        if isinstance(nodes, tuple | list):
            if len(nodes) != 2:
                raise UsageError(
                    f"nodes={nodes!r}: must be one number or a pair (min, max); write nodes=4, nodes=(2, 8) or "
                    "nodes=sky.Nodes(min=2, desired=4, max=8)",
                    field="nodes",
                    value=nodes,
                )
            least, most = nodes
            if most == 0:
                raise _refusal("max", most, _at_least("max", 1))
            return cls(least, max=most)
        if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
            raise UsageError(
                f"nodes={nodes!r}: must be a whole number >= 1; set nodes=1 or more, or a pair such as nodes=(0, 4) "
                "for a pool that grows and shrinks",
                field="nodes",
                value=nodes,
            )
        return cls(nodes, max=nodes)


def _at_least(field: str, least: int) -> str:
    return f"must be a whole number >= {least}; set {field}={least} or more"


def _refusal(field: str, value: object, problem: str) -> UsageError:
    return UsageError(f"nodes.{field}={value!r}: {problem}", field=f"nodes.{field}", value=value)
