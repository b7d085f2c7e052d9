"""Evaluations of a model that several ranks train: rank 0 sends, all gather."""

from __future__ import annotations

from typing import Any, Literal

from ..agree import Ranks
from .evaluator import AsyncEvaluator
from .records import EvaluationRecord
from .state import is_sharded, model_state

__all__ = ["submit_model"]


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
