"""Which kind of machine a pool rents: interruptible, or its own until it is given back."""

from __future__ import annotations

from typing import Literal, cast, get_args

from ..errors import UsageError

__all__ = ["AllocationStrategy", "validate_allocation"]

AllocationStrategy = Literal["spot", "on-demand", "spot-if-available", "cheapest"]
"""How machines are rented.

`"spot"`: interruptible only, and NoCapacity where there is none. `"on-demand"`: never interruptible.
`"spot-if-available"`: spot where all nodes can be had so; else as many as one offer has, and the others on demand, of
the same type and in the same zone; else on-demand. `"cheapest"`: whichever costs less now.
A provider that knows only one kind (this machine, the user's own hosts) ignores it.
"""

_LEGAL: tuple[str, ...] = get_args(AllocationStrategy)


def validate_allocation(value: object) -> AllocationStrategy:
    """`value` itself when it is an AllocationStrategy; raises UsageError that names the legal ones otherwise.

    >>> validate_allocation("spot")
    'spot'
    """
    if isinstance(value, str) and value in _LEGAL:
        return cast(AllocationStrategy, value)
    legal = ", ".join(repr(name) for name in _LEGAL)
    raise UsageError(f"allocation={value!r} is not known; use one of {legal}", field="allocation", value=value)
