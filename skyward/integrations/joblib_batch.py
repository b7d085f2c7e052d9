"""Batch of joblib's calls: its preparation before it travels, and the function that runs it on a slot."""

from __future__ import annotations

import copy
import importlib
import time
import warnings
from collections.abc import Callable
from typing import Any

from joblib.parallel import ThreadingBackend, cpu_count

from ..calls.compute import compute
from ..node.slot.runtime import instance_info


@compute
def run_batch(calls: Callable[[], list[Any]]) -> tuple[float, list[Any]]:
    """Make the calls; return the seconds that they took, and their values."""
    started = time.perf_counter()
    # Restore the slot's warning filters if the calls change them. Wrapping the calls in `catch_warnings` was rejected:
    # leaving it makes Python forget which warnings it has shown, so each batch would show them again.
    before = list(warnings.filters)
    try:
        values = calls()
        return time.perf_counter() - started, values
    finally:
        if list(warnings.filters) != before:
            with warnings.catch_warnings():
                pass  # makes Python read the filters again
            warnings.filters[:] = before  # type: ignore[index]  # a list, although its stub says otherwise


class ThreadsOfSlot(ThreadingBackend):  # type: ignore[misc]  # joblib ships no types
    """Threads for a `Parallel` inside a call; `n_jobs=-1` means the slot's share of its node's cores."""

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        info = instance_info()
        if info is None or n_jobs is None or n_jobs >= 0:
            return int(super().effective_n_jobs(n_jobs))
        cores: int = cpu_count()
        return max(cores // info.workers_per_node + 1 + n_jobs, 1)


# Warning filters ------------------------------------------------------------------------------------------------------
# scikit-learn sends the caller's warning filters with every call. They can name classes of packages that a node does
# not have (pytest's, a notebook's). One such class would make the whole batch unreadable there.


def travelling(calls: Any) -> Any:
    """Copy the batch with warning filters that every node can read. The originals stay as they are."""
    items = getattr(calls, "items", None)
    if not items or not any(hasattr(function, "warning_filters") for function, _, _ in items):
        return calls
    portable: dict[int, _Filters] = {}  # one entry for each list, so that pickle writes it once

    def prepared(function: Any) -> Any:
        filters = getattr(function, "warning_filters", None)
        if filters is None:
            return function
        function = copy.copy(function)
        function.warning_filters = portable.setdefault(id(filters), _Filters(filters))
        return function

    calls = copy.copy(calls)
    calls.items = [(prepared(function), args, kwargs) for function, args, kwargs in items]
    return calls


class _Filters:
    """Warning filters that unpickle to a list, without the entries whose category is unknown there."""

    def __init__(self, filters: Any) -> None:
        self._filters = tuple(filters)

    def __reduce__(self) -> Any:
        return _load_filters, ([(action, text, _name(kind), *rest) for action, text, kind, *rest in self._filters],)


def _name(kind: type) -> tuple[str, str] | type:
    by_value = kind.__module__ == "__main__" or "." in kind.__qualname__
    return kind if by_value else (kind.__module__, kind.__qualname__)


def _load_filters(filters: list[Any]) -> list[Any]:
    loaded = []
    for action, text, named, *rest in filters:
        kind = named
        if isinstance(named, tuple):
            try:
                kind = getattr(importlib.import_module(named[0]), named[1])
            except (ImportError, AttributeError):
                continue  # no code here can raise that warning
        loaded.append((action, text, kind, *rest))
    return loaded
