"""Evaluations of a model trained by several ranks: rank 0 sends, all ranks gather weights and learn the results."""

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

RANKS_TIMEOUT_S = 86_400.0
"""Seconds that ranks wait for rank 0, which may wait for an evaluation. A dead rank is noticed at once."""
DRAIN_POLL_S = 0.05
"""Seconds between polls of rank 0 after training ended, because the other ranks cannot wait on its futures."""


def submit_model(
    evaluator: AsyncEvaluator | None,
    model: Any,
    *,
    ranks: Ranks,
    step: int,
    epoch: float | None = None,
    trainable_only: bool | Literal["auto"] = "auto",
) -> EvaluationRecord | None:
    """Submit a torch model of several ranks, with `evaluator.submit` on rank 0.

    All ranks call it. If rank 0 skips the evaluation, nothing is gathered. The weights of an asynchronous checkpoint of
    this step are not copied a second time.

    Args:
        evaluator: rank 0's evaluator; None on the other ranks.
        model: the torch model, possibly sharded.
        ranks: the ranks that train it.
        step: optimizer steps that the weights have made.
        epoch: value for the record.
        trainable_only: as in `model_state`.

    Returns:
        As `AsyncEvaluator.submit` on rank 0, None on the others.

    Raises:
        UsageError: on rank 0, the evaluator is closed.
        RankFailed: on the other ranks, rank 0 failed before it gathered.

    Example:
        In a callback, on every rank:

            submit_model(evaluator if ranks.rank == 0 else None, model, ranks=ranks, step=state.global_step)
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
        if not was_asked:  # skipped, or failed: the others wait for a decision in any case
            ranks.share(False)


class Evaluations:
    """Evaluations of a callback: rank 0 has an evaluator while a run is on, and every rank learns the results.

    All ranks call the same methods in the same order. An error of rank 0's evaluator is raised on all of them.

    Args:
        owner: name of the callback, for errors.
        missing: the error's text if an evaluation is requested outside a run, as "problem; what to do".
        max_age_steps: older results become "late", counted from the step of the request.
        row: makes a row of `history` from a record; None for no rows.
        line: makes a line for standard output from a record, on rank 0; None for no lines.
        has_collective_events: the callback polls in collective events of skyward's bus. The bus passes an error of one
            rank to the others in their next exchange, so no verdicts are exchanged here.
    """

    def __init__(
        self,
        owner: str,
        *,
        missing: str = "no run is under way; start training first",
        max_age_steps: int | None = None,
        row: Callable[[EvaluationRecord], dict[str, Any]] | None = None,
        line: Callable[[EvaluationRecord], str] | None = None,
        has_collective_events: bool = False,
    ) -> None:
        self.history: list[dict[str, Any]] = []
        """One row per evaluation of all runs."""
        self.records: list[EvaluationRecord] = []
        """One record per evaluation of all runs."""
        self.ranks: Ranks = Alone()
        """Ranks of the run."""
        self.evaluator: AsyncEvaluator | None = None
        """Rank 0's evaluator while a run is on."""
        self.pending = 0
        """Evaluations submitted and not yet reported; the same number on all ranks."""
        self.is_open = False
        """True while a run is on."""
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
        """Begin a run. Collective.

        Args:
            make: creates the evaluator; called on rank 0 only.
            ranks: the ranks of the run; None means those of this process.
            trainable_only: as in `model_state`.

        Raises:
            RankFailed: `make` failed on rank 0; there, its own exception is raised.
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
        """End the evaluator. Idempotent, and not collective, because other ranks may be gone."""
        evaluator, self.evaluator = self.evaluator, None
        self.is_open, self.pending, self._unshared = False, 0, []
        if evaluator is not None:
            evaluator.close()

    def submit(self, model: Any, *, step: int, epoch: float | None) -> None:
        """Submit an evaluation of the model as it is now. Collective; raises the evaluator's error, or RankFailed."""
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
        """Submit a state that every rank has whole. Collective; otherwise as `AsyncEvaluator.submit`."""
        self._check_open()
        with self._together():
            if self.evaluator is not None:
                self.evaluator.submit(state, step=step, epoch=epoch)
        self.pending += 1

    def poll(self, *, step: int) -> list[EvaluationRecord]:
        """Return the records that have ended. Waits only for the other ranks, and only while something is open."""
        self._check_open()
        if self.pending == 0:
            return []
        error: Exception | None = None
        if self.evaluator is not None:
            try:
                self._unshared += self.evaluator.collect(step=step)
            except Exception as raised:  # raised below, once the other ranks know of it
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
        """Wait for the open evaluations and return their records. Collective.

        Args:
            step: training's current step.
            timeout_s: as in `AsyncEvaluator.drain`, for one rank and in collective events.
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
            raise UsageError(f"{self._owner}: {self._missing}")  # words: ok, its owner says what to do

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Share the outcome of a block: an error of one rank is raised on all."""
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
