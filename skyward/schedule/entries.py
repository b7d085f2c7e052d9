"""What is placed: tasks and gangs, with what the scheduler must know of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["GangEntry", "TaskEntry"]


@dataclass(slots=True, eq=False)
class TaskEntry:
    """A task, as long as it is open."""

    id: int
    nodes: tuple[int, ...] | None  # it may go to; None: any that is not kept
    retries: int
    in_advance: bool = True  # may be sent before a slot is free
    node: int | None = None
    is_recalled: bool = False
    parent: int | None = None
    """The task or gang that has called it."""
    turn: tuple[int, int] = (0, 0)

    @property
    def line(self) -> Hashable:
        return self.nodes if self.parent is None else ("nested", self.nodes)


@dataclass(slots=True, eq=False)
class GangEntry:
    """A gang, as long as it waits."""

    id: int
    nodes: tuple[int, ...] | None  # all of them; None: any one of `one_of`
    one_of: tuple[int, ...] | None  # None: of those that are not kept
    places: int  # on each node
    parent: int | None = None
    turn: tuple[int, int] = (0, 0)

    @property
    def line(self) -> Hashable:
        return self.parent is not None, self.nodes, self.one_of
