"""Whether evaluations run beside training or hold it up, by what either costs. Pure: it is told times, and has none.

Beside training an evaluation may share processors with it, and then both may take longer than one after the other.
An *interval* is from one evaluation to the next. In a trial beside training it ends when its evaluation has ended, too:
its length is then what it costs to go on like that for long, however much waits in queues.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["Gate", "GateMode", "Way"]

GateMode = Literal["auto", "always", "sync"]
Way = Literal["beside", "inline"]

TRIAL: tuple[Way, ...] = ("beside", "beside", "inline", "beside", "inline")
"""The first is not counted: models are made in it, and files are read for the first time."""
PATIENCE = 3
"""Times the trial's length: after that many intervals it is decided by what there is."""


class Gate:
    """Decides how each evaluation of a run goes.

    Args:
        mode: "auto" tries both ways for five intervals, and keeps the faster; "always" is beside, "sync" is inline.
    """

    def __init__(self, mode: GateMode) -> None:
        self._settled: Way | None = {"always": "beside", "sync": "inline"}.get(mode)  # type: ignore[assignment]
        self._at = 0
        self._seen = 0
        self._steps: int | None = None
        self._best: dict[Way, float] = {}

    @property
    def is_settled(self) -> bool:
        return self._settled is not None

    @property
    def way(self) -> Way:
        """How the next evaluation goes."""
        return self._settled or TRIAL[self._at]

    @property
    def seconds(self) -> dict[Way, float]:
        """The shortest interval of each way that the trial has seen."""
        return dict(self._best)

    def settle(self, way: Way) -> None:
        """Ends the trial: it is known."""
        self._settled = way

    def observe(self, seconds: float, *, steps: int) -> None:
        """One interval of the trial has ended, which went as `way` said.

        Args:
            seconds: its length, >= 0.
            steps: how many training made in it. Intervals of other lengths than the first cannot be compared, and are
                left out.
        """
        if self._settled is not None:
            return
        self._seen += 1
        if self._steps is None:
            self._steps = steps
        if steps == self._steps:
            way = TRIAL[self._at]
            if self._at > 0:
                self._best[way] = min(seconds, self._best.get(way, seconds))
            self._at += 1
        if self._at == len(TRIAL) or self._seen >= PATIENCE * len(TRIAL):
            inline = self._best.get("inline", float("inf"))
            self._settled = "beside" if self._best.get("beside", float("inf")) <= inline else "inline"
