"""Facts that user code can query about its own call: node, rank, head, values kept per process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

from ...core.signatures import checked_options
from ...values.topology import InstanceInfo, Rank

T = TypeVar("T")


class RunningCall(NamedTuple):
    """The running call. Only a gang sets `rank`."""

    task: int
    info: InstanceInfo
    rank: Rank | None = None
    agent: str = ""
    """Path of the socket of the node's agent."""
    names: frozenset[bytes] = frozenset()
    """Names of the blobs among its arguments, which the program knows."""

    @property
    def node(self) -> int:
        return self.info.node


# The module variable is for threads that user code starts, because a new thread has an empty context.
_current: ContextVar[RunningCall | None] = ContextVar("skyward_call", default=None)
_of_process: RunningCall | None = None


call_endings: dict[int, list[Callable[[int], None]]] = {}
"""Callbacks by task, called with its number when it ends. Empty for most tasks, so these pay for one look-up only."""


leases: dict[int, Callable[[bool], None]] = {}
"""Functions by task that free what its call holds in the pool's shared state. The argument: whether the call returned.
They are called when a call ends, before its outcome is sent. Empty for most tasks."""


def free_leases(task: int, *, is_well: bool) -> None:
    """Free what a call that ends now holds."""
    free = leases.pop(task, None)
    if free is not None:
        free(is_well)


def enter_call(call: RunningCall | None, *, whole_process: bool) -> None:
    """Set the current call of this context. In a process that runs one call at a time, set it for all threads."""
    global _of_process  # a process has one
    _current.set(call)
    if whole_process:
        _of_process = call


def current_call() -> RunningCall | None:
    """Return the call that this code runs in; None outside a pool."""
    call = _current.get()
    return _of_process if call is None else call


def current_rank() -> Rank | None:
    """Return this process's rank in the running gang; None in plain calls and outside a pool."""
    call = current_call()
    return None if call is None else call.rank


def instance_info() -> InstanceInfo | None:
    """Return facts about the place of this code: node, slot, accelerators, peers, rank.

    Any thread of a task may call it.

    Returns:
        The facts, or None outside a pool.

    Example:
        >>> instance_info() is None
        True

        In a task:

            info = sky.instance_info()
            print(f"node {info.node} of {info.total_nodes}, {info.accelerators} GPUs")
    """
    call = current_call()
    return None if call is None else call.info


class _IsHead:
    """Boolean that can also be called: `if sky.is_head:` and `sky.is_head(info)` both work."""

    def __call__(self, info: InstanceInfo | None = None) -> bool:
        info = info or instance_info()
        return info is None or info.is_head

    def __bool__(self) -> bool:
        return self()

    def __repr__(self) -> str:
        return repr(self())


is_head = _IsHead()
"""Whether this is the one process that should print, save and report.

True for rank 0 of a gang, for the first node of a broadcast, for a plain call on one node, and outside a pool. It can
also be called with an `InstanceInfo`.

Example:
    >>> bool(is_head)
    True
    >>> if is_head:
    ...     print("saved")
    saved
"""


_once: dict[Hashable, Any] = {}
_once_locks: dict[Hashable, threading.Lock] = {}
_once_guard = threading.Lock()


@checked_options
def once(key: Hashable, factory: Callable[[], T]) -> T:
    """Return the value that `factory()` made when `key` was first requested in this process.

    Use it to load a model once per slot. Threads wait for the one that runs the factory. If the factory raises, nothing
    is kept and the next caller tries again. A gang starts new processes for each call, so there it saves nothing.

    Args:
        key: any hashable name of the value.
        factory: makes the value; called without arguments.

    Returns:
        The value, the same object each time.

    Example:
        >>> once("answer", lambda: 42)
        42
    """
    with _once_guard:
        lock = _once_locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _once:
            _once[key] = factory()
        return cast(T, _once[key])
