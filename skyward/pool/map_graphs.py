"""Pending calls among the items of a map: each such item is a graph, whose calls run before the item is sent."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ..calls.futures import value_of
from ..calls.graphs import GraphRoot, has_calls
from ..calls.pending import ComputeFunction, PendingCompute

Prepare = Callable[[Sequence[PendingCompute[Any]]], list[GraphRoot]]
"""Function that prepares the graphs of one send; see `Graphs.prepare`."""


class MapGraphs:
    """Graphs of one map. Used by the map's own thread.

    Args:
        function: Function of the map.
        is_star: Whether each item is a tuple of arguments.
        prepare: Function that prepares graphs.
        events: Queue that gets ("resolved", None, index) when the arguments of an item are there.
    """

    def __init__(
        self,
        function: ComputeFunction[..., Any],
        *,
        is_star: bool,
        prepare: Prepare,
        events: queue.SimpleQueue[tuple[Any, ...]],
    ) -> None:
        self._function = function
        self._is_star = is_star
        self._prepare = prepare
        self._events = events
        self._roots: dict[int, GraphRoot] = {}
        """Graphs that have not begun, by the index of their item."""
        self._begun: dict[int, GraphRoot] = {}

    def __len__(self) -> int:
        """Return the number of items whose calls run now."""
        return len(self._begun)

    def add(self, items: Iterable[tuple[int, Any]]) -> None:
        """Prepare the graphs of the items that have calls. A call that two of them share runs once.

        Args:
            items: Pairs of index and item.
        """
        calls = {index: self._call(item) for index, item in items if has_calls(item)}
        self._roots.update(zip(calls, self._prepare(list(calls.values())), strict=True))

    def _call(self, item: Any) -> PendingCompute[Any]:
        function = self._function
        return PendingCompute(function, item if self._is_star else (item,), {}, function.options)

    def begin(self, index: int) -> None:
        """Run the calls of an item."""
        root = self._begun[index] = self._roots.pop(index)
        root.begin()
        root.future.add_done_callback(partial(_tell, self._events, index))

    def take(self, index: int) -> Any:
        """Return an item whose calls have run, with their values. Raises the error of a call."""
        call = value_of(self._begun.pop(index).future)
        return call.args if self._is_star else call.args[0]

    def abandon(self) -> None:
        """Cancel the calls that run. This may be a finalizer."""
        # Newest first, so that no waiting call replaces a stopped one.
        for root in reversed([*self._begun.values(), *self._roots.values()]):
            root.abandon()


def _tell(events: queue.SimpleQueue[tuple[Any, ...]], index: int, _: object) -> None:
    events.put(("resolved", None, index))
