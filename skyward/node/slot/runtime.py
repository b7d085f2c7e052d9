"""What user code can ask about the call that it is part of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

from ...core.signatures import checked_options
from ...values.topology import InstanceInfo, Rank

__all__ = [
    "RunningCall",
    "call_endings",
    "current_call",
    "current_rank",
    "enter_call",
    "instance_info",
    "is_head",
    "once",
]

T = TypeVar("T")


class RunningCall(NamedTuple):
    """The running call. `rank` is set in a gang only."""

    task: int
    info: InstanceInfo
    rank: Rank | None = None
    agent: str = ""
    """Path of the node's agent's socket."""

    @property
    def node(self) -> int:
        return self.info.node


# The main value is for threads that user code starts: a new thread has an empty context.
_current: ContextVar[RunningCall | None] = ContextVar("skyward_call", default=None)
_of_process: RunningCall | None = None


call_endings: dict[int, list[Callable[[int], None]]] = {}
"""By task: called with its number when it ends. Only what a call has opened is here, so most calls look up one key."""


def enter_call(call: RunningCall | None, *, whole_process: bool) -> None:
    """Make `call` the current one of this context and, where a process runs one call at a time, of all its threads."""
    global _of_process  # a process has one
    _current.set(call)
    if whole_process:
        _of_process = call


def current_call() -> RunningCall | None:
    """The call that this code runs in; None outside a pool."""
    call = _current.get()
    return _of_process if call is None else call


def current_rank() -> Rank | None:
    """This process's place in the running gang; None in plain calls and outside a pool."""
    call = current_call()
    return None if call is None else call.rank


def instance_info() -> InstanceInfo | None:
    """Where this code runs: node, slot, accelerators, peers, rank. None outside a pool.

    Example:
        >>> instance_info() is None
        True
    """
    call = current_call()
    return None if call is None else call.info


class _IsHead:
    """`sky.is_head` reads as a claim and may also be called: `if sky.is_head:` and `sky.is_head(info)` both work."""

    def __call__(self, info: InstanceInfo | None = None) -> bool:
        info = info or instance_info()
        return info is None or info.is_head

    def __bool__(self) -> bool:
        return self()

    def __repr__(self) -> str:
        return repr(self())


is_head = _IsHead()
"""Whether this is the one process that should print, save and report: rank 0 of a gang, the first node of a
broadcast, always in a plain call on one node and outside a pool."""


_once: dict[Hashable, Any] = {}
_once_locks: dict[Hashable, threading.Lock] = {}
_once_guard = threading.Lock()


@checked_options
def once(key: Hashable, factory: Callable[[], T]) -> T:
    """The value that `factory()` made the first time `key` was asked for in this process.

    Use it to load a model once for each slot. Threads wait for the one that makes it; if the factory raises, nothing
    is kept and the next caller tries again. A gang's processes are new for each call, so there it saves nothing.

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
