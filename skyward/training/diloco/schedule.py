"""Times of synchronisation: local steps by speed, and the inner step at which each fragment is sent and applied.

Sources: "Asynchronous Local-SGD" (arXiv 2401.09135) for DyLU; "Streaming DiLoCo" (arXiv 2501.18512).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from ...errors import UsageError
from ..evaluation.legal import check_at_least


def local_steps(speeds: Mapping[str, float], sync_every: int, *, least: int = 1) -> dict[str, int]:
    """Return the inner steps of each worker's next cycle, such that all take the same time (DyLU).

    A worker of speed v gets `floor(v / fastest * sync_every)` steps, at least `least` and at most `sync_every`.

    Args:
        speeds: Inner steps per second of each worker, finite and >= 0. 0 is a worker that has measured none yet: it
            gets `sync_every`.
        sync_every: Steps of the fastest worker, >= 1.
        least: Least steps of any worker, from 1 to `sync_every`.

    Raises:
        UsageError: A number is not legal.

    Source: arXiv 2401.09135 (Dynamic Local Updates).
    """
    check_at_least("sync_every", sync_every, 1)
    check_at_least("least", least, 1)
    if least > sync_every:
        raise UsageError(f"least={least}: is above sync_every={sync_every}; set least={sync_every} or lower")
    for worker, speed in speeds.items():
        if not (math.isfinite(speed) and speed >= 0):
            raise UsageError(f"speed of {worker!r}={speed!r}: must be a finite number >= 0; send steps per second")
    fastest = Fraction(max(speeds.values(), default=0.0))
    # Fractions, because floor() would lose a step where a float quotient ends just below a whole number.
    return {
        worker: max(least, math.floor(Fraction(speed) / fastest * sync_every)) if speed else sync_every
        for worker, speed in speeds.items()
    }


def split_parameters(sizes: Mapping[str, int], num_fragments: int) -> tuple[tuple[str, ...], ...]:
    """Split parameters into contiguous fragments of about equal size. Each parameter is in exactly one of them.

    Args:
        sizes: Number of values in each parameter, and in each buffer that is exchanged, in the order of the model.
        num_fragments: Number of fragments, from 1 to the number of tensors. None will be empty.

    Returns:
        The names of each fragment's tensors, in the given order.

    Raises:
        UsageError: There are fewer tensors than fragments.

    Source: arXiv 2501.18512 (the sequential pattern).
    """
    check_at_least("num_fragments", num_fragments, 1)
    if num_fragments > len(sizes):
        raise UsageError(
            f"num_fragments={num_fragments}: the model has {len(sizes)} tensors; set num_fragments to that or lower"
        )
    names = list(sizes)
    total, taken, end = sum(sizes.values()), 0, 0
    fragments: list[tuple[str, ...]] = []
    for number in range(1, num_fragments + 1):
        begin, last = end, len(names) - (num_fragments - number)
        # A parameter belongs to the fragment that holds its middle.
        while end < last and (end == begin or 2 * taken + sizes[names[end]] <= 2 * total * number / num_fragments):
            taken += sizes[names[end]]
            end += 1
        if number == num_fragments:
            end = len(names)
        fragments.append(tuple(names[begin:end]))
    return tuple(fragments)


def sync_steps(sync_every: int, num_fragments: int) -> tuple[int, ...]:
    """Return the inner step of a cycle, from 1 to H, after which each of the N fragments is sent.

    Fragment k follows step `ceil((k + 1) * H / N)`, so the last one follows step H. The gaps differ by at most one
    step, and no remainder adds up from cycle to cycle. With more fragments than steps, some share a step.

    Args:
        sync_every: Inner steps in a cycle, H >= 1.
        num_fragments: Number of fragments, N >= 1.

    Source: arXiv 2501.18512 (the offsets t_p), extended to an H that N does not divide.
    """
    return tuple(-(-number * sync_every // num_fragments) for number in range(1, num_fragments + 1))


@dataclass(frozen=True, slots=True)
class SyncAction:
    """One thing for a worker to do after an inner step."""

    kind: Literal["send", "apply"]
    """`send`: compute the fragment's delta and send it. `apply`: wait for its answer, and mix it in."""
    fragment: int


class SyncSchedule:
    """Schedule of one worker: what to send and apply after each inner step.

    At most one fragment is on its way. Its answer is applied `delay` steps after it was sent, but not later than the
    next one is sent. So a delay of the whole gap overlaps all of the transfer with training.

    Args:
        sync_every: Inner steps in a cycle, H >= 1.
        num_fragments: Number of fragments, N >= 1. One is plain DiLoCo.
        delay: Inner steps between sending and applying, tau >= 0.
        first_fragment: Fragment that is sent first: 0, or the next one of the other workers for a late joiner. It
            starts at the inner step after that of the fragment before.

    Example:
        >>> schedule = SyncSchedule(sync_every=4, num_fragments=2, delay=1)
        >>> [[(action.kind, action.fragment) for action in schedule.advance()] for _ in range(5)]
        [[], [('send', 0)], [('apply', 0)], [('send', 1)], [('apply', 1)]]

    Source: arXiv 2501.18512, algorithm 2.
    """

    def __init__(self, *, sync_every: int, num_fragments: int = 1, delay: int = 0, first_fragment: int = 0) -> None:
        check_at_least("sync_every", sync_every, 1)
        check_at_least("num_fragments", num_fragments, 1)
        check_at_least("delay", delay, 0)
        if not 0 <= first_fragment < num_fragments:
            raise UsageError(f"first_fragment={first_fragment}: no such fragment; use 0 to {num_fragments - 1}")
        self._num_fragments, self._delay = num_fragments, delay
        self._sync_every = self._next_sync_every = sync_every
        self._fragment = first_fragment
        self._step = sync_steps(sync_every, num_fragments)[first_fragment - 1] if first_fragment else 0
        self._in_flight: int | None = None
        self._steps_left = 0

    @property
    def sync_every(self) -> int:
        """Inner steps of the present cycle."""
        return self._sync_every

    @property
    def in_flight(self) -> int | None:
        """Fragment that was sent and is not applied yet."""
        return self._in_flight

    def change_sync_every(self, sync_every: int) -> None:
        """Use another H (DyLU) from the next cycle on. The present one keeps its H, so its fragments keep their steps.

        Raises:
            UsageError: The number is below 1.
        """
        check_at_least("sync_every", sync_every, 1)
        self._next_sync_every = sync_every
        if self._step == 0:
            self._sync_every = sync_every

    def advance(self) -> tuple[SyncAction, ...]:
        """Count one inner step, and return the actions that follow it, in order."""
        self._step += 1
        actions: list[SyncAction] = []
        if self._in_flight is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._apply(actions)
        steps = sync_steps(self._sync_every, self._num_fragments)
        while self._fragment < self._num_fragments and steps[self._fragment] <= self._step:
            self._apply(actions)
            actions.append(SyncAction("send", self._fragment))
            self._in_flight, self._steps_left = self._fragment, self._delay
            self._fragment += 1
            if self._delay == 0:
                self._apply(actions)
        if self._fragment == self._num_fragments:
            self._step = self._fragment = 0
            self._sync_every = self._next_sync_every
        return tuple(actions)

    def _apply(self, actions: list[SyncAction]) -> None:
        if self._in_flight is not None:
            actions.append(SyncAction("apply", self._in_flight))
            self._in_flight = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the cycle, as values for JSON."""
        return {
            "sync_every": self._sync_every,
            "next_sync_every": self._next_sync_every,
            "step": self._step,
            "fragment": self._fragment,
            "in_flight": self._in_flight,
            "steps_left": self._steps_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position that `state_dict` returned, with the same number of fragments and delay."""
        self._sync_every, self._next_sync_every = state["sync_every"], state["next_sync_every"]
        self._step, self._fragment = state["step"], state["fragment"]
        self._in_flight, self._steps_left = state["in_flight"], state["steps_left"]
