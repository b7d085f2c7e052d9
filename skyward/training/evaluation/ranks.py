"""Evaluations of a model that several ranks train: rank 0 sends, all gather its weights and learn the results."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from ...errors import UsageError
from ..agree import Alone, RankFailure, Ranks, ranks_of_this_process
from ..callbacks.lines import write_line
from .evaluator import AsyncEvaluator
from .records import EvaluationRecord
from .weights import is_sharded, model_state

__all__ = ["Evaluations", "submit_model"]

RANKS_TIMEOUT_S = 86_400.0
"""How long ranks wait for rank 0, which may be waiting for an evaluation. The death of a rank is noticed at once."""
DRAIN_POLL_S = 0.05
"""How often ranks ask rank 0 whether all has come, when training has ended: the others cannot wait on its futures."""


def submit_model(
    evaluator: AsyncEvaluator | None,
    model: Any,
    *,
    ranks: Ranks,
    step: int,
    epoch: float | None = None,
    trainable_only: bool | Literal["auto"] = "auto",
) -> EvaluationRecord | None:
    """`evaluator.submit` of a torch model, as rank 0 decides. All ranks call it; a skipped one gathers nothing.

    A copy that an asynchronous checkpoint of this step has is not made again.

    Args:
        evaluator: rank 0's; None on the others.

    Raises: on rank 0 as `submit`; RankFailed, on the others, when rank 0 failed before it gathered.
    """
    if ranks.world_size == 1 or not is_sharded(model):
        if evaluator is None:
            return None
        return evaluator.submit(
            lambda: model_state(model, trainable_only=trainable_only), step=step, epoch=epoch, shares_copy=True
        )
    if evaluator is None:
        if ranks.share(False):
            model_state(model, trainable_only=trainable_only)
        return None
    was_asked = False

    def gathered() -> Any:
        nonlocal was_asked
        was_asked = True
        ranks.share(True)
        return model_state(model, trainable_only=trainable_only)

    try:
        return evaluator.submit(gathered, step=step, epoch=epoch)
    finally:
        if not was_asked:
            ranks.share(False)


class Evaluations:
    """A callback's evaluations: rank 0 has an evaluator while a run is on, and every rank learns the results.

    All ranks call the same methods in the same order. An error of rank 0's evaluator is raised on all of them.

    Args:
        owner: how errors name the callback.
        missing: what is wrong where an evaluation is asked for outside a run.
        max_age_steps: older results come as "late", counted from the step at which they are asked for.
        row: makes a row of `history` of a record; None: there are no rows.
        line: makes a line for standard output, on rank 0; None: no lines.
        has_collective_events: whether the callback polls in collective events of our bus. The bus then tells an error
            of one rank to the others in their next exchange, so no verdicts are exchanged here.
    """

    def __init__(
        self,
        owner: str,
        *,
        missing: str = "no fit is under way",
        max_age_steps: int | None = None,
        row: Callable[[EvaluationRecord], dict[str, Any]] | None = None,
        line: Callable[[EvaluationRecord], str] | None = None,
        has_collective_events: bool = False,
    ) -> None:
        self.history: list[dict[str, Any]] = []
        """A row for each evaluation of all runs."""
        self.records: list[EvaluationRecord] = []
        """A record for each evaluation of all runs."""
        self.ranks: Ranks = Alone()
        """The ranks of the run."""
        self.evaluator: AsyncEvaluator | None = None
        """Rank 0's, while a run is on."""
        self.pending = 0
        """Evaluations that were asked for and are not reported yet. The same on all ranks."""
        self.is_open = False
        """Whether a run is on."""
        self._owner, self._missing, self._max_age_steps = owner, missing, max_age_steps
        self._row, self._line, self._has_collective_events = row, line, has_collective_events
        self._trainable_only: bool | Literal["auto"] = "auto"
        self._unshared: list[EvaluationRecord] = []

    def open(
        self,
        make: Callable[[], AsyncEvaluator],
        *,
        ranks: Ranks | None = None,
        trainable_only: bool | Literal["auto"] = "auto",
    ) -> None:
        """Begin a run. Every rank calls it.

        Args:
            make: makes the evaluator; called on rank 0 only.
            ranks: the ranks of the run; None: those of this process.
            trainable_only: as `evaluation.model_state` has it.

        Raises: what `make` raises, or RankFailed.
        """
        self.close()
        self.ranks = ranks or ranks_of_this_process(timeout_s=RANKS_TIMEOUT_S)
        self._trainable_only = trainable_only
        with self._together():
            if self.ranks.rank == 0:
                self.evaluator = make()
                self.evaluator.warm_up()
        self.is_open = True

    def close(self) -> None:
        """End the evaluator. Idempotent. It takes part in nothing: it may be called where other ranks are gone."""
        evaluator, self.evaluator = self.evaluator, None
        self.is_open, self.pending, self._unshared = False, 0, []
        if evaluator is not None:
            evaluator.close()

    def submit(self, model: Any, *, step: int, epoch: float | None) -> None:
        """Ask for an evaluation of the model as it is now. Raises: what the evaluator raises, or RankFailed."""
        self._check_open()
        with self._together():
            submit_model(
                self.evaluator,
                model,
                ranks=self.ranks,
                step=step,
                epoch=epoch,
                trainable_only=self._trainable_only,
            )
        self.pending += 1

    def submit_state(self, state: Any, *, step: int, epoch: float | None) -> None:
        """As `submit`, of a state that every rank has whole: what `AsyncEvaluator.submit` takes."""
        self._check_open()
        with self._together():
            if self.evaluator is not None:
                self.evaluator.submit(state, step=step, epoch=epoch)
        self.pending += 1

    def poll(self, *, step: int) -> list[EvaluationRecord]:
        """Return what has ended. It waits for nothing but the other ranks, and only while something is open."""
        self._check_open()
        if self.pending == 0:
            return []
        error: Exception | None = None
        if self.evaluator is not None:
            try:
                self._unshared += self.evaluator.collect(step=step)
            except Exception as raised:  # raised below, where the other ranks hear of it
                error = raised
        if not self._has_collective_events and not self.ranks.flags(bool(self._unshared) or error is not None):
            return []
        with self._together():
            if error is not None:
                raise error
        records, self._unshared = self.ranks.share(self._unshared), []
        self.pending -= len(records)
        return [self._note(record, step) for record in records]

    def drain(self, *, step: int, timeout_s: float | None = None) -> list[EvaluationRecord]:
        """Return what was open, when all of it has ended.

        Args:
            timeout_s: as AsyncEvaluator's, in a world of one rank and in collective events.
        """
        self._check_open()
        records: list[EvaluationRecord] = []
        while self.pending:
            if self.evaluator is not None and (self.ranks.world_size == 1 or self._has_collective_events):
                self._unshared += self.evaluator.drain(timeout_s)
            records += self.poll(step=step)
            if self.pending:
                time.sleep(DRAIN_POLL_S)
        return records

    def _check_open(self) -> None:
        if not self.is_open:
            raise UsageError(f"{self._owner}: {self._missing}")

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A block after which every rank hears how it went on the others: an error of one is raised on all."""
        try:
            yield
        except Exception as error:
            if not self._has_collective_events:
                self.ranks.fail(RankFailure.of(self.ranks.rank, error, self._owner))
            raise
        if not self._has_collective_events:
            self.ranks.exchange(None)

    def _note(self, record: EvaluationRecord, step: int) -> EvaluationRecord:
        is_old = self._max_age_steps is not None and step - record.step > self._max_age_steps
        if is_old and record.status == "ok":
            record = dataclasses.replace(record, status="late")
        self.records.append(record)
        if self._row is not None:
            self.history.append(self._row(record))
        if self._line is not None and self.ranks.rank == 0:
            write_line(self._line(record))
        return record
