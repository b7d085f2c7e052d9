"""What the callbacks of all frameworks have in common: what their users say of evaluations, and what comes of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from ...errors import UsageError
from ..agree import Ranks, ranks_of_this_process
from ..evaluation.ranked import RANKS_TIMEOUT_S, RankedEvaluator

if TYPE_CHECKING:
    from ..evaluation import AsyncEvaluator, EvaluationRecord, Timeline
    from ..evaluation.evaluator import Drain, OnBackpressure, OnError
    from ..evaluation.gate import GateMode
    from ..snapshot import SnapshotPool

__all__ = ["Beside", "EvaluatorOptions", "line_of", "row_of", "row_of_epoch"]


@dataclass(frozen=True, kw_only=True)
class EvaluatorOptions:
    """Options of `AsyncEvaluator`, by the names that the callbacks' users know. It says what is wrong with them."""

    val_compute: Any
    drain: Drain
    cache_key: str | None
    """The evaluator's own where it is "auto"."""
    fp16_state_dict: bool
    max_pending: int
    on_backpressure: OnBackpressure
    async_copy: bool = True
    on_error: OnError
    gate: GateMode
    timeout_s: float | None
    snapshots: SnapshotPool | None = None
    timeline: Timeline | None

    @property
    def is_here(self) -> bool:
        """Whether evaluations run in this process."""
        return self.val_compute is None or getattr(self.val_compute, "shares_memory", False) is True

    def evaluator(self, model_factory: Any, eval_fn: Any, payload: Any = None, **more: Any) -> AsyncEvaluator:
        """more: further options of `AsyncEvaluator`. Raises: as it does."""
        from ..evaluation import AsyncEvaluator

        options = {each.name: getattr(self, each.name) for each in fields(self)}
        names = {"compute": "val_compute", **more.pop("argument_names", {})}
        if options["cache_key"] == "auto":
            del options["cache_key"]
        options["compute"] = options.pop("val_compute")
        return AsyncEvaluator(model_factory, eval_fn, payload, **options, **more, argument_names=names)


class Beside:
    """A callback's evaluator, which all ranks have while a run is on, and what has come of it.

    max_age_steps: as RankedEvaluator's. ranks: of the run; None: those of this process.
    """

    _is_missing = "no fit is under way"

    def __init__(self, options: EvaluatorOptions, *, max_age_steps: int | None, ranks: Ranks | None) -> None:
        super().__init__()
        self._options, self._max_age_steps, self._given_ranks = options, max_age_steps, ranks
        self._beside: RankedEvaluator | None = None
        self.history: list[dict[str, Any]] = []
        self.records: list[EvaluationRecord] = []

    @property
    def pending(self) -> int:
        """Evaluations that have been asked for, and not been told of yet."""
        return 0 if self._beside is None else self._beside.open

    def close(self) -> None:
        """Ends what this object has started. Called when training ends; not every framework tells of a run that raises.
        Idempotent.
        """
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.close()

    @property
    def _met(self) -> RankedEvaluator:
        if self._beside is None:
            raise UsageError(f"{type(self).__name__}: {self._is_missing}")
        return self._beside

    def _ranks_of_run(self) -> Ranks:
        return self._given_ranks or ranks_of_this_process(timeout_s=RANKS_TIMEOUT_S)

    def _open(
        self,
        evaluator: Callable[[], AsyncEvaluator],
        ranks: Ranks,
        *,
        trainable_only: bool | Literal["auto"] = "auto",
    ) -> None:
        """Every rank calls it. evaluator: makes it, on rank 0. Raises: what it raises, or RankFailed."""
        self._beside = RankedEvaluator(
            evaluator,
            ranks=ranks,
            trainable_only=trainable_only,
            max_age_steps=self._max_age_steps,
            where=type(self).__name__,
        )


def row_of(record: EvaluationRecord) -> dict[str, Any]:
    """As histories have it."""
    return {**record.row(), **({"skipped": True} if record.status == "skipped" else {})}


def row_of_epoch(record: EvaluationRecord) -> dict[str, Any]:
    """As those have it that evaluate whole epochs."""
    epoch = None if record.epoch is None else int(record.epoch)
    return {**row_of(record), "worker_name": record.worker, "epoch": epoch}


def line_of(record: EvaluationRecord, what: str, metrics: dict[str, Any]) -> str:
    """For standard output. what: was evaluated. metrics: of which numbers are told."""
    if record.status in ("skipped", "failed"):
        return f"{what}: {record.status}: {record.error}"
    told = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, int | float))
    late = ", too late to decide anything" if record.status == "late" else ""
    return f"{what}: {told} ({record.worker}, {record.elapsed_s or 0:.2f} s{late})"
