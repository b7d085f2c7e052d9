"""Rules for when training waits for its evaluations, and which of them are skipped."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Literal

from .gate import Gate, GateMode, Way
from .legal import check_at_least, check_one_of
from .pipeline import Evaluation, EvaluationPipeline

_log = logging.getLogger(__name__)

Drain = Literal["lazy", "strict"]
OnBackpressure = Literal["skip", "queue", "block"]

PRESSURE_S = 30.0
"""Expected wait of a job above which a dispatcher without its own `is_backpressured` counts as behind."""
SAYS_AFTER_S = 60.0
"""Seconds between two log lines of `wait_for_all`."""


class Pace:
    """Decide how training proceeds with evaluations beside it. For the training thread.

    An evaluation is submitted between `arrive` and `leave`; the time between `leave` and `arrive` is training.

    Args:
        pipeline: the evaluator's pipeline.
        drain: as in `AsyncEvaluator`.
        on_backpressure: as in `AsyncEvaluator`.
        max_pending: as in `AsyncEvaluator`.
        gate: as in `AsyncEvaluator`.

    Raises:
        UsageError: an option is out of its range.
    """

    def __init__(
        self,
        pipeline: EvaluationPipeline,
        *,
        drain: Drain,
        on_backpressure: OnBackpressure,
        max_pending: int,
        gate: GateMode,
    ) -> None:
        check_one_of("drain", drain, Drain)
        check_one_of("on_backpressure", on_backpressure, OnBackpressure)
        check_one_of("gate", gate, GateMode)
        check_at_least("max_pending", max_pending, 1)
        self._pipeline, self._dispatcher = pipeline, pipeline.dispatcher
        self._drain, self._on_backpressure, self._max_pending = drain, on_backpressure, max_pending
        self._timeline, self._name = pipeline.timeline, pipeline.name
        self._gate = Gate(gate)
        if gate == "auto" and getattr(self._dispatcher, "is_elsewhere", False):
            self._gate.settle("beside")
        self._left_at = time.time()
        self._left_step: int | None = None
        """None in the first interval, which begins with the evaluator, at an unknown step."""
        self._interval_at: float | None = time.perf_counter()
        """None if the current interval says nothing to the gate."""
        self._interval_step = 0
        self._was_warm = False

    @property
    def way(self) -> Way:
        """Way of the next evaluation."""
        return self._gate.way

    def arrive(self, step: int) -> Way:
        """Note that training has arrived at an evaluation; return the way of this evaluation."""
        if self._timeline is not None:
            name = f"to step {step}" if self._left_step is None else f"steps {self._left_step} to {step}"
            self._timeline.add("training", name, self._left_at, time.time())
        if not self._gate.is_settled:
            self._tell_gate(step)
        return self._gate.way

    def make_room(self) -> str | None:
        """Wait for room as configured; return the reason to skip this evaluation, or None."""
        if self._drain == "strict":
            self._wait_for_oldest()
        pending = len(self._pipeline.open)
        if pending >= self._max_pending:
            if self._on_backpressure == "skip":
                return f"{pending} evaluations were open, which is max_pending"
            self._wait_for_oldest(until=self._max_pending - 1)
        if self._on_backpressure != "queue" and self._is_under_pressure():
            if self._on_backpressure == "skip":
                return f"{self._dispatcher.name} is behind by {self._dispatcher.pressure():.3g} s"
            self._wait_for_oldest()
        return None

    def leave(self, step: int, *, has_skipped: bool = False) -> None:
        """Note that training continues."""
        if has_skipped:
            self._interval_at = None  # an interval without an evaluation is not comparable
        self._left_at, self._left_step = time.time(), step
        self._was_warm = self._evaluation_s() is not None

    def wait_for(self, evaluation: Evaluation) -> None:
        """Wait until the evaluation has its record."""
        self._wait("inline", lambda: evaluation.record is not None)

    def wait_for_all(self, timeout_s: float | None) -> None:
        """Wait until no evaluation is open; cancel the remaining ones after `timeout_s`."""
        began, deadline = time.time(), math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._pipeline.wait(lambda: not self._pipeline.open, _patience(deadline)):
            opened = self._pipeline.open
            if time.monotonic() < deadline:
                oldest = opened[0].step if opened else None
                _log.warning("%s: waiting for %d evaluations, the oldest of step %s", self._name, len(opened), oldest)
                continue
            for evaluation in opened:
                self._pipeline.cancel(evaluation, f"cancelled, not ended {timeout_s:g} s after training")
        self._draw(began, "drain")

    # Internals -------------------------------------------------------------------------------------------------------

    def _tell_gate(self, step: int) -> None:
        now, evaluation_s = time.perf_counter(), self._evaluation_s() if self._was_warm else None
        if self._interval_at is not None:
            seconds, steps = now - self._interval_at, step - self._interval_step
            slots, is_clear = self._dispatcher.slots, not self._pipeline.open
            self._gate.observe(seconds, steps=steps, evaluation_s=evaluation_s, slots=slots, is_clear=is_clear)
            if self._gate.is_settled:
                _log.info("%s: evaluations go %s: %s", self._name, self._gate.way, self._gate.seconds)
        self._interval_at, self._interval_step = now, step

    def _evaluation_s(self) -> float | None:
        """Return the seconds of an evaluation, or None if a slot may be cold."""
        return self._pipeline.shortest_s if self._pipeline.scored >= self._dispatcher.slots else None

    def _is_under_pressure(self) -> bool:
        says = getattr(self._dispatcher, "is_backpressured", None)
        return bool(says()) if callable(says) else self._dispatcher.pressure() > PRESSURE_S

    def _wait_for_oldest(self, until: int | None = None) -> None:
        """Wait until the oldest evaluation has ended, or until `until` are left."""
        opened = self._pipeline.open
        if opened:
            left = len(opened) - 1 if until is None else until
            self._wait("block", lambda: len(self._pipeline.open) <= left)

    def _wait(self, why: str, is_met: Callable[[], bool]) -> None:
        began = time.time()
        self._pipeline.wait(is_met)
        self._draw(began, why)

    def _draw(self, began: float, why: str) -> None:
        if self._timeline is not None:
            self._timeline.add("training", "wait", began, time.time(), why=why)


def _patience(deadline: float) -> float:
    """Return the seconds until the next log line, or until a time by the monotonic clock."""
    return min(SAYS_AFTER_S, max(0.0, deadline - time.monotonic()))
