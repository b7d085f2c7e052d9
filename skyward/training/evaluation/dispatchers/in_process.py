"""Evaluations in threads of this process. Nothing is pickled or copied.

They share the processor and the GIL with training. For compute-heavy evaluations, measure (`gate="auto"`).
"""

from __future__ import annotations

from collections.abc import Callable

from ..dispatcher import Job, Outcome
from ..worker import Worker
from .seats import Seat, SeatedDispatcher


class InProcessDispatcher(SeatedDispatcher):
    """Run evaluations in threads of this process, each with its own models. Thread-safe.

    A thread cannot be killed. If its evaluation is cancelled or times out, the thread is abandoned with its model and
    ends together with the evaluation; another thread takes its slot.

    Args:
        slots: evaluations at once, >= 1.
        name: name for records and plots.

    Raises:
        UsageError: `slots` is below 1.

    Example:
        >>> InProcessDispatcher(slots=2)
        <InProcessDispatcher 'in-process' slots=2>
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
        return "it continues in an abandoned thread, because a thread cannot be killed"

    def close(self) -> None:
        """Do nothing, because nothing was opened."""
