"""Open pools of this process, and the pool that the right side of an operator means."""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Protocol

from ..core.unrun import short
from ..errors import NoActivePool, UsageError
from .futures import Future


class PoolLike(Protocol):
    """Target of calls, as the operators see it. A call is a `PendingCompute`, a group a `PendingComputeGroup`."""

    def run(self, call: Any, /) -> Any: ...
    def submit(self, call: Any, /) -> Future[Any]: ...
    def broadcast(self, call: Any, /) -> list[Any]: ...
    def run_group(self, group: Any) -> Any: ...
    def submit_group(self, group: Any) -> Future[tuple[Any, ...]]: ...
    def run_async(self, call: Any, /) -> Coroutine[Any, Any, Any]: ...


class GangTarget(PoolLike, Protocol):
    """Target whose calls all run on several nodes, so that each has a list of values: `pool.any(2)`."""

    @property
    def gang_size(self) -> int: ...


Target = PoolLike | ModuleType

# A context variable knows the innermost pool of this context. Other threads and notebook cells have contexts of their
# own, so they fall back to the innermost pool of the process.
_of_context: ContextVar[tuple[PoolLike, ...]] = ContextVar("skyward_active_pools", default=())
_of_process: list[PoolLike] = []
_lock = threading.Lock()


class Activity:
    """Counters of this process, so that a closing pool can report calls that were made but never sent.

    They are not locked, and calls count only once per shape of arguments. That is enough to tell none from some.
    """

    calls_made = 0
    last_made = ""
    pools_opened = 0


activity = Activity()


def push_active(pool: PoolLike) -> None:
    activity.pools_opened += 1
    _of_context.set((*_of_context.get(), pool))
    with _lock:
        _of_process.append(pool)


def pop_active(pool: PoolLike) -> None:
    _of_context.set(tuple(p for p in _of_context.get() if p is not pool))
    with _lock:
        if pool in _of_process:
            _of_process.remove(pool)


def open_pools() -> list[PoolLike]:
    """Return the open pools of this process, oldest first."""
    with _lock:
        return list(_of_process)


def active_pool() -> PoolLike:
    """Return the innermost open pool. Raises NoActivePool."""
    still_open = open_pools()
    for pool in reversed(_of_context.get()):
        if pool in still_open:
            return pool
    if still_open:
        return still_open[-1]
    raise NoActivePool(
        "target=sky: no pool is open here; write `with sky.ComputePool(provider=sky.Local()):` around the call, "
        "or name the pool: `f() >> pool`. Inside a task there is no pool: call the function's .local(...)"
    )


def resolve_target(target: Target) -> PoolLike:
    """Return the pool that the right side of an operator means. Raises NoActivePool or UsageError."""
    if isinstance(target, ModuleType):
        if target.__name__ == "skyward":
            return active_pool()
    elif hasattr(target, "run_group") and not isinstance(target, type):
        return target
    advice = (
        "open a pool with it: sky.ComputePool(provider=...)"
        if hasattr(target, "launch")
        else "put a ComputePool or the module skyward on the right side of >>, > and @"
    )
    raise UsageError(f"target={short(target)}: is not a pool; {advice}")
