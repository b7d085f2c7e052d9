"""Call of a detached pool, as its clients list it."""

from __future__ import annotations

from typing import Literal

from ..core.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Call:
    """Call of a detached pool that is open, or whose outcome nobody has taken; see `ComputePool.calls`.

    Args:
        id: Number of the call, unique in the pool.
        name: Name of the function.
        state: "waiting", "running", "done" or "failed".
        node: Node that it was sent to, of a gang the first one; None while it waits, and once it has ended.
        since: Time at which the pool got it, in seconds since the epoch.

    Example:
        >>> import skyward as sky
        >>> sky.Call(id=2, name="train", state="running", node=0, since=1795281234.5).state
        'running'
    """

    id: int
    name: str
    state: Literal["waiting", "running", "done", "failed"]
    node: int | None
    since: float
