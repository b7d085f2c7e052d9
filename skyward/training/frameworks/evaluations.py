"""The one asynchronous evaluation below the callbacks of all frameworks: its options, its ranks, its results."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from ...core.signatures import checked_options
from ...errors import UsageError
from ..agree import Alone, RankFailure, Ranks, ranks_of_this_process
from ..callbacks.lines import write_line
from ..evaluation.evaluator import AsyncEvaluator, Drain, OnBackpressure, OnError
from ..evaluation.gate import GateMode
from ..evaluation.ranks import submit_model
from .foreign import plain

if TYPE_CHECKING:
    from ..evaluation import EvaluationRecord, Timeline
    from ..snapshot import SnapshotPool

__all__ = [
    "Drain",
    "Evaluations",
    "EvaluatorOptions",
    "RunOptions",
    "check_callable",
    "line_of",
    "named",
    "row_of",
    "with_options",
]

Class = TypeVar("Class", bound=type)

RANKS_TIMEOUT_S = 86_400.0
"""How long ranks wait for rank 0, which may be waiting for an evaluation. The death of a rank is noticed at once."""
DRAIN_POLL_S = 0.05
"""How often ranks ask rank 0 whether all has come, when training has ended: the others cannot wait on its futures."""


class EvaluatorOptions(TypedDict, total=False):
    """Options that are passed on to `AsyncEvaluator` as they are. Their defaults, checks and meanings are its own."""

    cache_key: str | None
    fp16_state_dict: bool
    max_pending: int
    on_backpressure: OnBackpressure
    on_error: OnError
    gate: GateMode
    timeout_s: float | None
    timeline: Timeline | None


class RunOptions(EvaluatorOptions, total=False):
    """Options of callbacks, which take copies of a model on its device."""

    async_copy: bool
    snapshots: SnapshotPool | None


def with_options(options: type) -> Callable[[Class], Class]:
    """Decorate a class whose constructor takes `**options: Unpack[options]`: spell them out in its signature.

    So help and errors know each by its name, and a misspelt one is refused when the object is made.
    """

    def decorate(kind: Class) -> Class:
        function: Any = kind.__init__  # type: ignore[misc]  # of this class, not of one below it
        signature, theirs = inspect.signature(function), inspect.signature(AsyncEvaluator).parameters
        own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(
            parameters=[*own, *(theirs[name] for name in options.__annotations__)]
        )
        return checked_options(kind)

    return decorate


def check_callable(**functions: Any) -> None:
    """Raise UsageError for an argument that is no function, by its name."""
    for field, function in functions.items():
        if not callable(function):
            raise UsageError(f"{field}={function!r}: it cannot be called; give a function")


class Evaluations:
    """A callback's evaluations: rank 0 has an evaluator while a run is on, and every rank learns the results.

    All ranks call the same methods in the same order. An error of rank 0's evaluator is raised on all of them.

    Args:
        owner: how errors name the callback.
        options: of AsyncEvaluator, but for `val_compute`, which is its `compute`.
        missing: what is wrong where an evaluation is asked for outside a run.
        max_age_steps: older results come as "late", counted from the step at which they are asked for.
        ranks: of the run; None: those of this process.
        row: makes a row of `history` of a record; None: one of a whole epoch.
        line: makes a line for standard output, on rank 0; None: no lines.
    """

    def __init__(
        self,
        owner: str,
        options: Mapping[str, Any],
        *,
        missing: str = "no fit is under way",
        max_age_steps: int | None = None,
        ranks: Ranks | None = None,
        row: Callable[[EvaluationRecord], dict[str, Any]] | None = None,
        line: Callable[[EvaluationRecord], str] | None = None,
    ) -> None:
        self.history: list[dict[str, Any]] = []
        """A row for each evaluation of all runs."""
        self.records: list[EvaluationRecord] = []
        """The same as records."""
        self.ranks: Ranks = Alone()
        """Of the run."""
        self.evaluator: AsyncEvaluator | None = None
        """Rank 0's, while a run is on."""
        self.pending = 0
        """Evaluations that were asked for and have not been told of yet. The same on all ranks."""
        self._owner, self._options, self._missing = owner, options, missing
        self._row, self._line = row or _row_of_epoch, line
        self._max_age_steps, self._given_ranks = max_age_steps, ranks
        self._trainable_only: bool | Literal["auto"] = "auto"
        self._known: list[EvaluationRecord] = []
        self._is_open = False

    @property
    def are_here(self) -> bool:
        """Whether they run in this process."""
        compute = self._options["val_compute"]
        return compute is None or getattr(compute, "shares_memory", False) is True

    def make(self, *parts: Any, argument_names: Mapping[str, str] | None = None, **more: Any) -> AsyncEvaluator:
        """Make the evaluator, on any rank. parts: model_factory, eval_fn, payload. more: further options.

        argument_names: how errors name the parts. Raises: as AsyncEvaluator does.
        """
        given = {**self._options, **more}
        given["compute"] = given.pop("val_compute")
        return AsyncEvaluator(*parts, **given, argument_names={"compute": "val_compute", **(argument_names or {})})

    def open(self, make: Callable[[], AsyncEvaluator], *, trainable_only: bool | Literal["auto"] = "auto") -> None:
        """Begin a run. Every rank calls it. make: makes the evaluator; called on rank 0 only.

        trainable_only: as `evaluation.model_state` has it. Raises: what `make` raises, or RankFailed.
        """
        self.close()
        self.ranks = self._given_ranks or ranks_of_this_process(timeout_s=RANKS_TIMEOUT_S)
        self._trainable_only = trainable_only
        with self._together():
            if self.ranks.rank == 0:
                self.evaluator = make()
                self.evaluator.warm_up()
        self._is_open = True

    def close(self) -> None:
        """End the evaluator. Idempotent. It takes part in nothing: it may be called where other ranks are gone."""
        evaluator, self.evaluator = self.evaluator, None
        self._is_open, self.pending, self._known = False, 0, []
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
                self._known += self.evaluator.collect(step=step)
            except Exception as raised:  # the other ranks hear of it below
                error = raised
        if not self.ranks.flags(bool(self._known) or error is not None):
            return []
        with self._together():
            if error is not None:
                raise error
        told, self._known = self.ranks.share(self._known), []
        self.pending -= len(told)
        return [self._note(record, step) for record in told]

    def drain(self, *, step: int, timeout_s: float | None = None) -> list[EvaluationRecord]:
        """Return what was open, when all of it has ended. timeout_s: of a world of one rank, as AsyncEvaluator's."""
        self._check_open()
        told: list[EvaluationRecord] = []
        while self.pending:
            if self.ranks.world_size == 1 and self.evaluator is not None:
                self._known += self.evaluator.drain(timeout_s)
            told += self.poll(step=step)
            if self.pending:
                time.sleep(DRAIN_POLL_S)
        return told

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError(f"{self._owner}: {self._missing}")

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A block after which every rank hears how it went on the others: an error of one is raised on all."""
        try:
            yield
        except Exception as error:
            self.ranks.fail(RankFailure.of(self.ranks.rank, error, self._owner))
            raise
        self.ranks.exchange(None)

    def _note(self, record: EvaluationRecord, step: int) -> EvaluationRecord:
        is_old = self._max_age_steps is not None and step - record.step > self._max_age_steps
        if is_old and record.status == "ok":
            record = dataclasses.replace(record, status="late")
        self.records.append(record)
        self.history.append(self._row(record))
        if self._line is not None and self.ranks.rank == 0:
            write_line(self._line(record))
        return record


def named(metrics: Mapping[str, Any], prefix: str, *, instead_of: str = "") -> dict[str, Any]:
    """Return metrics as numbers, with names that begin with `prefix`, which takes the place of `instead_of`."""
    return {
        name if name.startswith(prefix) else prefix + name.removeprefix(instead_of): plain(value)
        for name, value in metrics.items()
    }


def row_of(record: EvaluationRecord) -> dict[str, Any]:
    """Make a row of `history`, with the keys that users of Sakura know."""
    return {**record.row(), **({"skipped": True} if record.status == "skipped" else {})}


def _row_of_epoch(record: EvaluationRecord) -> dict[str, Any]:
    epoch = None if record.epoch is None else int(record.epoch)
    return {**row_of(record), "worker_name": record.worker, "epoch": epoch}


def line_of(record: EvaluationRecord, what: str, metrics: Mapping[str, Any]) -> str:
    """Make a line for standard output. what: was evaluated. metrics: of which numbers are told."""
    if record.status in ("skipped", "failed"):
        return f"{what}: {record.status}: {record.error}"
    numbers = {name: plain(value) for name, value in metrics.items()}
    told = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if isinstance(value, int | float))
    late = ", too late to decide anything" if record.status == "late" else ""
    return f"{what}: {told} ({record.worker}, {record.elapsed_s or 0:.2f} s{late})"
