"""Iterators among the arguments of the client's calls, which only a client that is there can feed.

If a head is killed, the next one learns from the agents how far the iterators of running calls are. It counts the items
that are taken from then on, until the client asks for both and goes on. An iterator whose client has left ends with an
error. So no call waits for a program that will not come back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import UsageError
from ...wire.frames import FrameKind
from ..direct import DirectEngine
from ..sent_inputs import InputPosition
from ..tasks import Task

_NOT_FED = "its program has left the pool, so nothing more comes; call again from a program that stays"


class FedInputs:
    """Iterators of the client's calls. Used under the ledger's lock.

    Args:
        engine: Engine of the head.
        told: Tells the client how far the iterators of a call are.
        fail: Ends a call with an error.
        first_fed: Number of the first call whose client may be there.
    """

    def __init__(
        self,
        engine: DirectEngine,
        told: Callable[[int, dict[int, tuple[Any, ...]]], object],
        fail: Callable[[int, BaseException], object],
        first_fed: int,
    ) -> None:
        self._engine = engine
        self._told = told
        self._fail = fail
        self._first_fed = first_fed
        self._positions: dict[int, dict[int, InputPosition]] = {}
        """How far the iterators of calls are with which the client has not gone on yet, by call and argument."""

    def is_gone(self, task: Task) -> bool:
        """Return whether a call has iterators that nobody feeds."""
        return bool(task.head.inputs) and task.id < self._first_fed

    def took(self, call: int, lane: int) -> bool:
        """Note that a call has taken an item, and return whether its client must hear of that now."""
        positions = self._positions.get(call)
        if positions is None:
            return True
        at = positions.get(lane, InputPosition())
        positions[lane] = at._replace(taken=at.taken + 1)
        return False

    def take_up(self, task: Task, positions: Mapping[int, tuple[Any, ...]]) -> None:
        """Take the iterators of a call that a node has. `positions`: fields of their `InputPosition`, by argument."""
        if self.is_gone(task):
            self._end(task)
        elif task.head.inputs:
            self._positions[task.id] = {lane: InputPosition(*fields) for lane, fields in positions.items()}

    def go_on(self, call: int) -> None:
        """Let the client go on with the iterators of a call that a node has. Others begin with their first items."""
        positions = self._positions.pop(call, {})
        ledger = self._engine.ledger
        task = ledger.tasks.get(call)
        if task is not None and task.head.inputs and ledger.node_of(task) is not None:
            self._told(call, {lane: tuple(position) for lane, position in positions.items()})

    def end_before(self, first_fed: int) -> None:
        """End the iterators of all calls before a number, because their client is gone.

        Calls that are not taken up yet end theirs then.
        """
        self._first_fed = first_fed
        self._positions.clear()
        for task in [task for task in self._engine.ledger.tasks.values() if self.is_gone(task)]:
            self._end(task)

    def refuse(self, task: Task) -> None:
        """Fail a call that has not begun, because nobody feeds its iterators."""
        self._fail(task.id, UsageError(f"{task.name!r}: iterator argument: {_NOT_FED}"))

    def _end(self, task: Task) -> None:
        """End the iterators of a call. If it is on no node, it fails."""
        if self._engine.ledger.node_of(task) is None:
            self._engine.cancel(task.id)
            self.refuse(task)
            return
        for lane in range(task.head.inputs):
            self._engine.streams.end_input(task.id, FrameKind.IN_ERROR, lane, _NOT_FED)
