"""The losses of Hugging Face's Trainer as its `training_step` gives them, before its filter makes numbers of them.

With `logging_nan_inf_filter`, its default, a loss that is not finite is replaced by the mean of those before it in the
interval, which is 0 at first: a run that has diverged logs a loss of 0. There is no event between the two.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ...agree import Ranks
from ..foreign import put

__all__ = ["NOT_FINITE", "UnfilteredLosses"]

NOT_FINITE = float("nan")
"""What callbacks get for a loss that the filter hides. It is known by identity, so that Hugging Face's own record of
the log stays as it is."""


class UnfilteredLosses:
    """Whether there was a finite loss since the last log. Nothing is waited for until a log asks."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._has_finite: Any = None  # a tensor where the losses are; None before the first loss

    def attach(self, trainer: Any) -> None:
        """Looks at each loss of this trainer until `detach`. Idempotent: a run that raises does not detach."""
        self.detach()
        if trainer is None:
            return

        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            self._note(loss)
            return loss

        step = put(self._undo, trainer, "training_step", training_step)

    def detach(self) -> None:
        """Gives the trainer its `training_step` back."""
        self._undo.close()
        self._has_finite = None

    def are_hidden(self, ranks: Ranks) -> bool:
        """Whether all losses of any rank since the last time were not finite. Collective. Begins the next interval."""
        has_finite, self._has_finite = self._has_finite, None
        return bool(ranks.flags(int(has_finite is not None and not bool(has_finite))))

    def _note(self, loss: Any) -> None:
        import torch

        if isinstance(loss, torch.Tensor):
            is_finite = torch.isfinite(loss.detach()).any()
            self._has_finite = is_finite if self._has_finite is None else self._has_finite | is_finite
