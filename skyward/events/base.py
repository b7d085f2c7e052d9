"""Base of all events, and receivers of events."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import field

from ..core.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events of a pool. Events are frozen values.

    Args:
        at: Time of the event in seconds since the epoch, by this machine's clock.

    Example:
        >>> def show(event: Event) -> None:
        ...     print(type(event).__name__)
        >>> show(NodeReady(node=0))
        NodeReady
    """

    at: float = field(default_factory=time.time, compare=False)


Emit = Callable[[Event], None]
"""Receiver of events. Any thread may call it; it returns quickly and raises nothing."""


def ignore(event: Event) -> None:
    """Drop an event: an `Emit` for callers that need none.

    Example:
        >>> ignore(NodeReady(node=0))
    """
