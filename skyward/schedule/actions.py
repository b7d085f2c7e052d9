"""Decisions of the scheduler, as values that the owner carries out."""

from __future__ import annotations

from typing import NamedTuple

from ..core.records import dataclass


class Send(NamedTuple):
    """Order to send a task to a node. It is made for each call, and a tuple takes a quarter of a data class's time."""

    task: int
    node: int
    devices: tuple[int, ...] | None = None
    """Devices of the node that the task may use; None for those of its slot."""


@dataclass(frozen=True, slots=True)
class Recall:
    task: int
    node: int


@dataclass(frozen=True, slots=True)
class FailTask:
    """Failure of a task that cannot run, or run again. `started`: True, False, or None if nobody knows."""

    task: int
    node: int | None
    started: bool | None


@dataclass(frozen=True, slots=True)
class StartGang:
    gang: int
    nodes: tuple[int, ...]
    devices: tuple[tuple[int, ...] | None, ...] = ()
    """Devices of each node that the gang may use; empty where no node has any."""


@dataclass(frozen=True, slots=True)
class FailGang:
    """Failure of a waiting gang that can never start, because nodes that it needs are gone."""

    gang: int
    node: int | None


@dataclass(frozen=True, slots=True)
class Settle:
    """Place of an actor that books resources. `devices` as in Send."""

    actor: int
    node: int
    devices: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Unsettle:
    """Refusal of an actor that no node can ever hold, or whose nodes are gone. `why` says so in words."""

    actor: int
    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refusal of a call that can never start.

    `why` says what no node can ever hold. Without it, the call is nested, and tasks that wait for calls of their own
    hold all its places.
    """

    call: int
    nodes: tuple[int, ...]
    why: str = ""


Action = Send | Recall | FailTask | StartGang | FailGang | Settle | Unsettle | Refuse
