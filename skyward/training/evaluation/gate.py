"""Whether evaluations run beside training or between its steps, by the cost of either. Pure: no clock.

Beside training an evaluation may share processors with it, and then both may take longer than one after the other. As
long as processors only share their time, that is no slower than taking turns; so a run begins beside training, and a
short run stays there. Evaluations between steps are tried when the run has lasted so long that the trial is cheap.

An *interval* is from one evaluation to the next. A trial of a fixed number of intervals, with training waiting for each
evaluation so that intervals are comparable, was tried: it cost short runs more than the wrong choice would have.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["Gate", "GateMode", "Way"]

GateMode = Literal["auto", "always", "sync"]
Way = Literal["beside", "inline"]

TRIALS = 2
"""Intervals with the evaluation inline that are compared with those beside."""
TRIAL_SHARE = 0.05
"""Of the time of the run so far: what all trials together may cost."""


class Gate:
    """Decides how each evaluation of a run goes.

    Args:
        mode: "auto" begins beside, tries both ways and keeps the faster; "always" is beside, "sync" is inline.
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
        """How the next evaluation goes."""
        return self._settled or self._next

    @property
    def seconds(self) -> dict[Way, float]:
        """The shortest interval of each way so far."""
        return dict(self._best)

    def settle(self, way: Way) -> None:
        """Ends the trial: it is known."""
        self._settled = way

    def observe(
        self, seconds: float, *, steps: int, evaluation_s: float | None, slots: int = 1, is_clear: bool = True
    ) -> None:
        """Note one interval, which went as `way` said.

        Args:
            seconds: its length, >= 0.
            steps: how many training made in it. Only intervals of equal length are compared.
            evaluation_s: how long an evaluation lasts on a warm worker; None: the worker was cold, and the interval
                tells nothing.
            slots: evaluations that run at once, >= 1.
            is_clear: no evaluation is open now, so the next one would begin at once.
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
        # Results come no faster than evaluations end, so beside training these may be the longer part.
        length_s = max(seconds, evaluation_s / slots) if way == "beside" else seconds
        self._best[way] = min(length_s, self._best.get(way, length_s))
        self._trials += way == "inline"
        if self._trials >= TRIALS and len(self._best) == 2:
            self._settled = "beside" if self._best["beside"] <= self._best["inline"] else "inline"
        elif is_clear and "beside" in self._best and self._spent_s + evaluation_s <= TRIAL_SHARE * self._run_s:
            self._next = "inline"
            self._spent_s += evaluation_s
