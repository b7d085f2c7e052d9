"""Evaluations in threads of this process: nothing is pickled, and a state is read where it is.

They share the processor, and the GIL, with training. Where evaluations compute much, measure (`gate="auto"`).
"""

from __future__ import annotations

from collections.abc import Callable

from ..dispatcher import Job, Outcome
from ..worker import Worker
from .seats import Seat, SeatedDispatcher

__all__ = ["InProcessDispatcher"]


class InProcessDispatcher(SeatedDispatcher):
    """Runs evaluations in threads of this process, each with models of its own. Thread-safe.

    A thread cannot be killed: one whose evaluation was cancelled or ran out of time is left alone with its model,
    counts no more, and ends when its evaluation does.

    Args:
        slots: evaluations at once, >= 1.
        name: for records and pictures.

    Raises: UsageError.
    """

    shares_memory = True

    def __init__(self, *, slots: int = 1, name: str = "in-process") -> None:
        super().__init__(slots=slots, name=name)

    def _new_seat(self, number: int) -> Seat:
        return _Here(number, self.name)


class _Here(Seat):
    def __init__(self, number: int, name: str) -> None:
        super().__init__(number)
        self._name = name
        self._worker = Worker(is_guest=True)

    def run(self, job: Job, began: Callable[[], None]) -> Outcome:
        began()
        scored = self._worker.run(
            factory=job.factory.value,
            load=job.load.value,
            eval_fn=job.eval_fn.value,
            payload=job.payload.value,
            cache_key=job.cache_key,
            state=job.state,
        )
        return Outcome(
            value=scored.value,
            worker=self._name,
            started_at=scored.started_at,
            finished_at=scored.finished_at,
            load_s=scored.loaded_at - scored.started_at,
        )

    def give_up(self) -> str:
        return "it goes on in a thread that counts no more, as a thread cannot be ended"

    def close(self) -> None:
        """Nothing was opened."""
