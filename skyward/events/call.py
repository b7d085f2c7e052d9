"""Events of calls."""

from __future__ import annotations

from ..core.records import dataclass
from .base import Event


@dataclass(frozen=True, kw_only=True)
class TaskSent(Event):
    """A task is on its way to a node: one call, one rank of a gang, or one chunk of a map.

    A task that waits on a node, while another node is idle, is sent there. Then it has two of these events.

    Args:
        task: Number of the task in the pool; a retry keeps it.
        name: Name of the call.
        node: Index of the node.
        rank: Rank of a gang, or None.
        calls: Number of calls in the task; more than 1 for chunks of a map.

    Example:
        >>> TaskSent(task=7, name="train", node=0, rank=0).rank
        0
    """

    task: int
    name: str
    node: int
    rank: int | None = None
    calls: int = 1


@dataclass(frozen=True, kw_only=True)
class TaskEnded(Event):
    """A task that was sent has ended.

    Args:
        task: Number of the task in the pool.
        name: Name of the call.
        node: Index of the node.
        ok: Whether the task delivered its value. False if the call raised, was cancelled, or was lost.
        seconds: Time since the last TaskSent.
        rank: Rank of a gang, or None.
        calls: Number of calls in the task.

    Example:
        >>> TaskEnded(task=7, name="train", node=0, ok=False, seconds=12.0).ok
        False
    """

    task: int
    name: str
    node: int
    ok: bool
    seconds: float
    rank: int | None = None
    calls: int = 1


@dataclass(frozen=True, kw_only=True)
class Overlooked(Event):
    """Likely mistake of the program.

    An unread failure and calls that were never sent are reported when the pool closes. A stream that nobody reads is
    reported while calls wait for its slot.

    Args:
        text: The mistake, in one sentence.

    Example:
        >>> Overlooked(text="2 calls failed and their futures were not read").text
        '2 calls failed and their futures were not read'
    """

    text: str
