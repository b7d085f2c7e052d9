"""What a scheduler decides; its owner carries it out."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Action", "FailGang", "FailTask", "Recall", "Refuse", "Send", "StartGang"]


@dataclass(frozen=True, slots=True)
class Send:
    task: int
    node: int


@dataclass(frozen=True, slots=True)
class Recall:
    task: int
    node: int


@dataclass(frozen=True, slots=True)
class FailTask:
    """The task cannot be run (again). `started`: True, False, or None where nobody knows."""

    task: int
    node: int | None
    started: bool | None


@dataclass(frozen=True, slots=True)
class StartGang:
    gang: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FailGang:
    """A gang that has not started can never start: it needs nodes that are gone."""

    gang: int
    node: int | None


@dataclass(frozen=True, slots=True)
class Refuse:
    """A task or gang that a task has called can never start: tasks that wait for calls of their own hold all places."""

    call: int
    nodes: tuple[int, ...]


Action = Send | Recall | FailTask | StartGang | FailGang | Refuse
