"""The pools that are open in this process, and the one that an operator's right side means."""

from __future__ import annotations

import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Protocol

from ..core.unrun import short
from ..errors import NoActivePool, UsageError

__all__ = [
    "PoolLike",
    "Target",
    "active_pool",
    "activity",
    "open_pools",
    "pop_active",
    "push_active",
    "resolve_target",
]


class PoolLike(Protocol):
    """A target of calls, as the operators see it. A call is a `PendingCompute`, a group a `PendingComputeGroup`."""

    def run(self, call: Any, /) -> Any: ...
    def submit(self, call: Any, /) -> Future[Any]: ...
    def broadcast(self, call: Any, /) -> list[Any]: ...
    def run_group(self, group: Any) -> Any: ...
    def submit_group(self, group: Any) -> Future[tuple[Any, ...]]: ...
    def run_async(self, call: Any, /) -> Coroutine[Any, Any, Any]: ...


Target = PoolLike | ModuleType

# Open pools. A context variable knows the innermost pool of this context; threads and notebook cells that the pool
# was not opened in have contexts of their own, and fall back to the innermost of the process.
_of_context: ContextVar[tuple[PoolLike, ...]] = ContextVar("skyward_active_pools", default=())
_of_process: list[PoolLike] = []
_lock = threading.Lock()


class Activity:
    """What happened in this process, so that a pool which closes can tell calls that were made and never sent.

    Counted without a lock, and calls only the first time that they have a shape: enough to tell none from some.
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
    """Those of this process, in the order in which they were opened."""
    with _lock:
        return list(_of_process)


def active_pool() -> PoolLike:
    """The innermost open pool. Raises NoActivePool."""
    still_open = open_pools()
    for pool in reversed(_of_context.get()):
        if pool in still_open:
            return pool
    if still_open:
        return still_open[-1]
    raise NoActivePool(
        "no pool is open here: write `with sky.ComputePool(provider=sky.Local()):` around the call, "
        "or name the pool: `f() >> pool`. Inside a task there is no pool: call the function's .local(...)"
    )


def resolve_target(target: Target) -> PoolLike:
    """The pool that an operator's right side means."""
    if isinstance(target, ModuleType):
        if target.__name__ == "skyward":
            return active_pool()
    elif hasattr(target, "run_group") and not isinstance(target, type):
        return target
    hint = "; open a pool of it: sky.ComputePool(provider=...)" if hasattr(target, "launch") else ""
    raise UsageError(
        f"{short(target)} is not a pool; the right side of >>, >, @ is a ComputePool or the module skyward{hint}"
    )
