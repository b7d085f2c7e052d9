"""Allocation strategies: whether a pool rents interruptible machines, on-demand machines, or both."""

from __future__ import annotations

from typing import Literal, cast, get_args

from ..errors import UsageError

AllocationStrategy = Literal["spot", "on-demand", "spot-if-available", "cheapest"]
"""Rental strategy of a pool's machines.

- `"spot"`: interruptible machines only; NoCapacity if there are none.
- `"on-demand"`: never interruptible.
- `"spot-if-available"` (the pool's default): spot if all nodes are available as spot. Otherwise as many spot nodes as
  one offer has, and the rest on demand, of the same type and in the same zone. Otherwise on demand.
- `"cheapest"`: the cheaper of the two now.

Providers with only one kind (this machine, the user's own hosts) ignore it.

Example:
    >>> import skyward as sky
    >>> sky.ComputePool(provider=sky.Local(), allocation="on-demand").spec.allocation
    'on-demand'
"""

_LEGAL: tuple[str, ...] = get_args(AllocationStrategy)


def validate_allocation(value: object) -> AllocationStrategy:
    """Return the value if it is an AllocationStrategy. Raises UsageError, which lists the legal ones.

    >>> validate_allocation("spot")
    'spot'
    """
    if isinstance(value, str) and value in _LEGAL:
        return cast(AllocationStrategy, value)
    legal = ", ".join(repr(name) for name in _LEGAL)
    raise UsageError(f"allocation={value!r}: unknown strategy; use one of {legal}", field="allocation", value=value)
