"""One evaluator for all ranks of a run: rank 0 has it, every rank takes part, and every rank hears what came of it.

All ranks call the same methods in the same order. An error of rank 0's evaluator is raised on all of them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from ..agree import Failure, Ranks

if TYPE_CHECKING:
    from . import AsyncEvaluator, EvaluationRecord

__all__ = ["RANKS_TIMEOUT_S", "RankedEvaluator"]

RANKS_TIMEOUT_S = 86_400.0
"""How long ranks wait for rank 0, which may be waiting for an evaluation. The death of a rank is noticed at once."""
DRAIN_POLL_S = 0.05
"""How often ranks ask rank 0 whether all has come, when training has ended: the others cannot wait on its futures."""


class RankedEvaluator:
    """An `AsyncEvaluator` as the ranks of one run share it.

    Args:
        evaluator: makes it; called on rank 0 only, at once.
        trainable_only: as `evaluation.model_state` has it.
        max_age_steps: older results come as "late", counted from the step at which they are asked for.
        where: how errors name it.
    """

    def __init__(
        self,
        evaluator: Callable[[], AsyncEvaluator],
        *,
        ranks: Ranks,
        trainable_only: bool | Literal["auto"] = "auto",
        max_age_steps: int | None = None,
        where: str,
    ) -> None:
        self._ranks, self._where = ranks, where
        self._trainable_only, self._max_age_steps = trainable_only, max_age_steps
        self._evaluator: AsyncEvaluator | None = None
        self._known: list[EvaluationRecord] = []
        self._open = 0
        error: Exception | None = None
        if ranks.rank == 0:
            try:
                self._evaluator = evaluator()
                self._evaluator.warm_up()
            except Exception as raised:
                error = raised
        self._agree_on(error)

    @property
    def open(self) -> int:
        """Evaluations that were asked for and have not been told of yet. The same on all ranks."""
        return self._open

    def submit(self, model: Any, *, step: int, epoch: float | None) -> None:
        """Asks for an evaluation of the model as it is now. Raises: what the evaluator raises, or RankFailed."""
        from . import submit_model

        self._submit(
            lambda: submit_model(
                self._evaluator,
                model,
                ranks=self._ranks,
                step=step,
                epoch=epoch,
                trainable_only=self._trainable_only,
            )
        )

    def submit_state(self, state: Any, *, step: int, epoch: float | None) -> None:
        """As `submit`, of a state that every rank has whole: what `AsyncEvaluator.submit` takes."""
        evaluator = self._evaluator
        self._submit(lambda: None if evaluator is None else evaluator.submit(state, step=step, epoch=epoch))

    def poll(self, *, step: int) -> list[EvaluationRecord]:
        """What has ended. Waits for nothing but the other ranks, and only while something is open."""
        if self._open == 0:
            return []
        error: Exception | None = None
        if self._evaluator is not None:
            try:
                self._known += self._evaluator.collect(step=step)
            except Exception as raised:
                error = raised
        if not self._ranks.flags(bool(self._known) or error is not None):
            return []
        self._agree_on(error)
        told, self._known = self._ranks.share(self._known), []
        self._open -= len(told)
        return [self._aged(record, step) for record in told]

    def drain(self, *, step: int) -> list[EvaluationRecord]:
        """What was open, when all of it has ended."""
        told: list[EvaluationRecord] = []
        while self._open:
            if self._ranks.world_size == 1 and self._evaluator is not None:
                self._known += self._evaluator.drain()
            told += self.poll(step=step)
            if self._open:
                time.sleep(DRAIN_POLL_S)
        return told

    def close(self) -> None:
        """Ends the evaluator. Takes part in nothing: it may be called where other ranks are gone."""
        if self._evaluator is not None:
            self._evaluator.close()

    def _submit(self, submit: Callable[[], object]) -> None:
        error: Exception | None = None
        try:
            submit()
        except Exception as raised:
            error = raised
        self._agree_on(error)
        self._open += 1

    def _agree_on(self, error: Exception | None) -> None:
        if error is not None:
            self._ranks.fail(Failure.of(self._ranks.rank, error, self._where))
            raise error
        self._ranks.exchange(None)

    def _aged(self, record: EvaluationRecord, step: int) -> EvaluationRecord:
        is_old = self._max_age_steps is not None and step - record.step > self._max_age_steps
        return dataclasses.replace(record, status="late") if is_old and record.status == "ok" else record
