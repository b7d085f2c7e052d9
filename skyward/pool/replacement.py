"""Replacement of one pool by another: pools of the same name, and notebook cells that run again.

Users who run a cell again want a new pool in place of the old one, not a second rented pool beside it. A pool is
replaced when its variable is assigned another pool and nothing else in the notebook holds it. Garbage collection cannot
decide this: IPython's own references (`Out`, `_`) keep a pool alive forever. A pool with open work stays open, and so
does one that an object of the notebook refers to. A later cell that finds it unused closes it.
"""

from __future__ import annotations

import contextvars
import gc
import logging
import os
import threading
import types
import weakref
from collections.abc import Iterable, Sized
from types import FrameType
from typing import Any, Protocol, cast

from ..console.shell import ipython_shell
from ..errors import UsageError

_log = logging.getLogger(__name__)

_LONGEST_CONTAINER = 1000
"""Most items of a container that is searched for pools."""
_DEPTH = 6
"""Longest chain of references from a variable to a pool: an ExitStack has a deque of tuples of bound methods."""
_MOST_SEARCHED = 2000
"""Most objects of one level of such chains that are searched: about a millisecond."""
_NOT_SEARCHED = (type, types.ModuleType, FrameType, types.TracebackType, contextvars.Context)
"""Types of objects that lead to everything, and to pools that their user does not mean."""


class Replaceable(Protocol):
    """Pool that can be closed in favour of another."""

    @property
    def name(self) -> str: ...
    @property
    def job_id(self) -> str: ...
    @property
    def has_work(self) -> bool: ...
    def give_way(self, why: str) -> None: ...


_lock = threading.Lock()
_open: weakref.WeakSet[Replaceable] = weakref.WeakSet()
"""Pools of this process that are starting or open."""
_variables: weakref.WeakKeyDictionary[Replaceable, frozenset[str]] = weakref.WeakKeyDictionary()
"""Pool -> the variables that held it at the end of the last cell."""
_hooked: weakref.WeakSet[Any] = weakref.WeakSet()
_warned: weakref.WeakSet[Replaceable] = weakref.WeakSet()
"""Pools whose users know that they stay open."""


def make_way(pool: Replaceable, name: str, frame: FrameType | None) -> None:
    """Close the pools that `pool`, which is about to start, replaces. Blocks until they are closed.

    Args:
        pool: The new pool.
        name: Name that its user gave it, or empty.
        frame: Frame of its `start()`.

    Raises:
        UsageError: Another open pool has the name, and this is not a notebook.
    """
    shell = ipython_shell()
    with _lock:
        others = [other for other in _open if other is not pool]
        namesakes = [other for other in others if name and other.name == name]
        if namesakes and shell is None:
            raise UsageError(
                f"name={name!r}: another pool of that name is open in this process; close it, or choose another name",
                field="name",
            )
        _open.add(pool)
    if shell is None:
        return
    _follow(shell)
    target = _assigned(shell, frame)
    for other in others:
        if other in namesakes:
            other.give_way(f"another pool named {name!r} was opened")
        elif _is_replaced(other, shell, target):
            _close_unused(other, shell, target)


def withdraw(pool: Replaceable) -> None:
    """Forget a pool that is closed, or did not start. Idempotent."""
    with _lock:
        _open.discard(pool)
        _warned.discard(pool)
        _variables.pop(pool, None)


def _is_replaced(pool: Replaceable, shell: Any, target: str = "") -> bool:
    """Return whether nothing but `target`, the variable about to be assigned, still holds the pool."""
    if _holders(pool, shell) - {target}:
        return False
    known = set(_variables.get(pool, ()))
    if target and shell.user_ns.get(target) is pool:
        known.add(target)
    return any(name == target or isinstance(shell.user_ns.get(name), type(pool)) for name in known)


def _holders(pool: Replaceable, shell: Any) -> set[str]:
    """Return the user's variables that hold the pool, or a container with it."""
    return {name for name, value in _user_variables(shell) if _holds(value, pool)}


def _user_variables(shell: Any) -> list[tuple[str, Any]]:
    """Return the variables without those of IPython, which lead to all that was ever shown."""
    return [
        (name, value)
        for name, value in list(shell.user_ns.items())
        if not name.startswith("_") and name not in shell.user_ns_hidden
    ]


def _holds(value: Any, pool: Replaceable) -> bool:
    if type(value) in (list, tuple, dict) and len(value) <= _LONGEST_CONTAINER:
        return any(item is pool for item in (value.values() if type(value) is dict else value))
    return value is pool


def _close_unused(pool: Replaceable, shell: Any, target: str = "") -> None:
    """Close a replaced pool, or warn once that it stays open because something still uses it."""
    if pool.has_work:
        why, advice = "it has open calls, actors, connections or kept values", "end them, and the next cell closes it"
    elif user := _user_of(pool, shell, target):
        why, advice = f"{user!r} refers to it", f"close it there, or delete {user!r}"
    else:
        pool.give_way(f"{target or 'its variable'} was assigned another pool")
        return
    if pool not in _warned:
        _warned.add(pool)
        name = pool.name or pool.job_id
        _log.warning("%s: keeping this pool open beside the new one, because %s; %s", name, why, advice)


def _user_of(pool: Replaceable, shell: Any, target: str) -> str:
    """Return a variable, other than `target`, whose object leads to the pool; empty if there is none."""
    passed_over = {id(shell), id(shell.user_ns), id(shell.user_ns.get("Out"))}
    for name, value in _user_variables(shell):
        if name != target and id(value) not in passed_over and _leads_to(pool, value, passed_over):
            return name
    return ""


def _leads_to(pool: Replaceable, value: object, passed_over: set[int]) -> bool:
    level, seen = [value], {id(value), *passed_over}
    for _ in range(_DEPTH):
        following: list[object] = []
        for owner in level[:_MOST_SEARCHED]:
            for item in _referents(owner, pool):
                if item is pool:
                    return True
                if gc.is_tracked(item) and id(item) not in seen:
                    seen.add(id(item))
                    following.append(item)
        level = following
    return False


def _referents(owner: object, pool: Replaceable) -> Iterable[object]:
    """Return what an object refers to: attributes, items, closures, and locals of suspended generators."""
    kind = type(owner)  # isinstance() would ask proxies for the class of their object
    if issubclass(kind, (*_NOT_SEARCHED, type(pool))):
        return ()
    if kind is types.FunctionType:  # without its globals
        function = cast(types.FunctionType, owner)
        return (function.__closure__, function.__defaults__, function.__kwdefaults__)
    if kind in (list, tuple, dict, set, frozenset) and len(cast(Sized, owner)) > _LONGEST_CONTAINER:
        return ()
    return gc.get_referents(owner)


def _assigned(shell: Any, frame: FrameType | None) -> str:
    """Return the notebook variable that takes the value of the running statement's call; empty if there is none."""
    while frame is not None and not (frame.f_globals is shell.user_ns and frame.f_locals is frame.f_globals):
        frame = frame.f_back
    if frame is None:
        return ""
    import dis  # only in a notebook

    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti and instruction.opname not in ("CACHE", "COPY", "NOP"):
            return str(instruction.argval) if instruction.opname in ("STORE_NAME", "STORE_GLOBAL") else ""
    return ""


def _follow(shell: Any) -> None:
    """Record after each cell which variables hold which pools."""
    with _lock:
        if shell in _hooked:
            return
        _hooked.add(shell)

    def after_cell(*_: object) -> None:
        with _lock:
            pools = list(_open)
        for pool in pools:
            if holders := _holders(pool, shell):
                _variables[pool] = frozenset(holders)
            elif _is_replaced(pool, shell):
                _close_unused(pool, shell)

    shell.events.register("post_run_cell", after_cell)


def _forget_in_child() -> None:
    """Forget all pools after a fork: they belong to the parent."""
    global _lock
    _lock = threading.Lock()
    _open.clear()


os.register_at_fork(after_in_child=_forget_in_child)
