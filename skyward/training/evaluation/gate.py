"""Choice between evaluations beside training and between its steps, by measured cost. Pure: it reads no clock.

An evaluation beside training may share processors with it, so that both take longer. While processors only share their
time, that is no slower than taking turns. So a run begins beside training, and a short run stays there. Evaluations
between steps are tried once the run has lasted so long that the trial is cheap.

An *interval* lasts from one evaluation to the next. Another design was tried: a fixed number of trial intervals, in
which training waits for each evaluation so that intervals are comparable. It cost short runs more than a wrong choice.
"""

from __future__ import annotations

from typing import Literal

GateMode = Literal["auto", "always", "sync"]
Way = Literal["beside", "inline"]

TRIALS = 2
"""Inline intervals to compare with those beside."""
TRIAL_SHARE = 0.05
"""Share of the run's time so far that all trials together may cost."""


class Gate:
    """Decide the way of each evaluation of a run.

    Args:
        mode: "auto" starts beside, tries both ways and keeps the faster; "always" means beside, "sync" inline.
    """

    def __init__(self, mode: GateMode) -> None:
        self._settled: Way | None = {"always": "beside", "sync": "inline"}.get(mode)  # type: ignore[assignment]
        self._next: Way = "beside"
        self._trials = 0
        self._run_s = self._spent_s = 0.0
        self._steps: int | None = None
        self._best: dict[Way, float] = {}

    @property
    def is_settled(self) -> bool:
        return self._settled is not None

    @property
    def way(self) -> Way:
        """Way of the next evaluation."""
        return self._settled or self._next

    @property
    def seconds(self) -> dict[Way, float]:
        """Shortest interval of each way so far, in seconds."""
        return dict(self._best)

    def settle(self, way: Way) -> None:
        """End the trial, because the answer is known."""
        self._settled = way

    def observe(
        self, seconds: float, *, steps: int, evaluation_s: float | None, slots: int = 1, is_clear: bool = True
    ) -> None:
        """Note one interval that went as `way` said.

        Args:
            seconds: its length, >= 0.
            steps: training steps in it. Only intervals of equal length are compared.
            evaluation_s: duration of an evaluation on a warm worker; None if the worker was cold, because the interval
                then says nothing.
            slots: evaluations that can run at once, >= 1.
            is_clear: True if no evaluation is open, so that the next one would begin at once.
        """
        if self._settled is not None:
            return
        self._run_s += seconds
        way, self._next = self._next, "beside"
        if evaluation_s is None:
            return
        if steps != self._steps:
            self._steps = steps
            self._best.clear()
        # Results come no faster than evaluations end, so beside training these may be the bottleneck.
        length_s = max(seconds, evaluation_s / slots) if way == "beside" else seconds
        self._best[way] = min(length_s, self._best.get(way, length_s))
        self._trials += way == "inline"
        if self._trials >= TRIALS and len(self._best) == 2:
            self._settled = "beside" if self._best["beside"] <= self._best["inline"] else "inline"
        elif is_clear and "beside" in self._best and self._spent_s + evaluation_s <= TRIAL_SHARE * self._run_s:
            self._next = "inline"
            self._spent_s += evaluation_s
