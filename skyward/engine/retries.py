"""Budget of a call's further runs, and the pause before each of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..calls.options import CallOptions
from ..core.records import dataclass
from ..wire.failures import EncodedFailure

_LONGEST_S = 300.0
"""Longest pause that doubling leads to. A longer `retry_delay_s` stays as it is."""
_JITTER = 0.5


def has_retry_on(options: CallOptions) -> bool:
    """Return whether some exceptions of a call's function are retried."""
    return bool(options.retry_on or _names(options))


def is_retried_on(options: CallOptions, failure: EncodedFailure, error: Callable[[], BaseException]) -> bool:
    """Return whether a call is retried after its function raised.

    Args:
        options: Options of the call.
        failure: The exception as it arrived.
        error: Unpickles it, which only a process does that has the user's classes.
    """
    if options.retry_on:
        return isinstance(error(), options.retry_on)
    return not set(_names(options)).isdisjoint(failure.classes)


def _names(options: CallOptions) -> tuple[str, ...]:
    """Return the names of the classes, if these options came from a process with classes that this one lacks."""
    from ..calls.named_options import NamedOptions  # only failures need it

    return options.retry_names if isinstance(options, NamedOptions) else ()


def pause_s(first_s: float, retry: int, draw: float) -> float:
    """Return the seconds to wait before a retry.

    The pause doubles with each retry, up to 5 minutes. It is never shorter than that, because a service may ask for a
    certain pause, and up to half longer, so that calls that failed together do not come back together.

    Args:
        first_s: Shortest pause before the first retry, >= 0.
        retry: Number of the retry, from 1.
        draw: Random number in [0, 1).
    """
    doubled_s = first_s * 2.0 ** min(retry - 1, 64)
    return min(doubled_s, max(first_s, _LONGEST_S)) * (1 + _JITTER * draw)


class RetriesLeft(NamedTuple):
    """Further runs that are left to a call, as another process takes them up that goes on with it."""

    retries: int
    retries_on_loss: int
    max_restarts: int
    retry_delay_s: float
    """Shortest pause before the run after the next one."""
    due_at: float = 0.0
    """Time of the next run, in seconds since 1970."""
    starts: int = 0
    """Starts of a gang that are over."""

    @classmethod
    def of(cls, options: CallOptions) -> RetriesLeft:
        return cls(options.retries, options.retries_on_loss, options.max_restarts, options.retry_delay_s)

    def options_of(self, options: CallOptions) -> CallOptions:
        """Return the options of a call that has no other runs left."""
        return replace(
            options,
            retries=self.retries,
            retries_on_loss=self.retries_on_loss,
            max_restarts=self.max_restarts,
            retry_delay_s=self.retry_delay_s,
        )

    @property
    def pause_s(self) -> float:
        """Seconds until the next run. At most one pause: the clock may have been set back."""
        return min(max(0.0, self.due_at - time.time()), self.retry_delay_s)


class Retries:
    """Further runs that are left to one call, one gang, or one item of a map.

    The loss of a node spends `retries_on_loss` first, without a pause: the next run starts on another node or on the
    replacement. Every other retry spends `retries`, after a pause.

    Args:
        options: Options of the call.
    """

    __slots__ = ("_first_pause_s", "_left", "_left_on_loss", "_pauses")

    def __init__(self, options: CallOptions) -> None:
        self._left = options.retries
        self._left_on_loss = options.retries_on_loss
        self._first_pause_s = options.retry_delay_s
        self._pauses = 0

    def spend(self, *, is_node_loss: bool) -> float | None:
        """Use up one retry. Return the seconds to wait before it; None: no retry is left."""
        if is_node_loss and self._left_on_loss > 0:
            self._left_on_loss -= 1
            return 0.0
        if self._left > 0:
            self._left -= 1
            return self.next_pause_s()
        return None

    def next_pause_s(self) -> float:
        """Return the seconds to wait before the next run."""
        self._pauses += 1
        if not self._first_pause_s:
            return 0.0
        import random  # few calls need it

        return pause_s(self._first_pause_s, self._pauses, random.random())

    def left(self, wait_s: float, *, max_restarts: int = 0, starts: int = 0) -> RetriesLeft:
        """Return the runs that are left beside one that begins in `wait_s` seconds."""
        delay_s = pause_s(self._first_pause_s, self._pauses + 1, 0.0)
        return RetriesLeft(self._left, self._left_on_loss, max_restarts, delay_s, time.time() + wait_s, starts)


@dataclass(eq=False, slots=True)
class Rerun:
    """Everything that it takes to submit a task once more: its place, and its retries."""

    nodes: tuple[int, ...] | None
    parent: int | None
    retries: Retries
