"""What a run adds up between its logs: losses, tokens and operations, without making the device wait."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..agree import Ranks

__all__ = ["Record"]


class Record:
    """Sums of this rank since the last log, kept where the losses are; and those of the run.

    Its state holds every rank's sums, so a run that goes on logs the same numbers as one that was never interrupted.
    filters: leave steps whose loss is not finite out of the mean, unless all are.
    """

    def __init__(self, ranks: Ranks, device: torch.device, *, filters: bool) -> None:
        self._ranks, self._filters = ranks, filters
        kind = torch.float32 if device.type == "mps" else torch.float64
        self._zero = torch.zeros(2, dtype=kind, device=device)
        self._sums = self._zero.clone()  # of finite losses; how many were not
        self._steps = 0
        self._tokens = 0
        self._flos = 0.0
        self._all_losses = 0.0
        self._all_steps = 0
        self._has_drained = False

    def add(self, loss: torch.Tensor, *, tokens: int, flos: float) -> None:
        """One step of this rank. loss: ()"""
        loss = loss.detach().to(self._sums.dtype)
        if self._filters:
            finite = torch.isfinite(loss)
            self._sums += torch.stack([torch.where(finite, loss, 0.0), (~finite).to(loss.dtype)])
        else:
            self._sums[0] += loss
        self._steps += 1
        self._tokens += tokens
        self._flos += flos

    @property
    def steps(self) -> int:
        """Since the last log."""
        return self._steps

    def drain(self, extra: Any = None) -> tuple[float, int, float, list[Any]]:
        """Since the last log, over all ranks: the mean loss of a step, tokens, operations; and every rank's `extra`.

        Collective. Begins the next interval.
        """
        total, skipped = self._sums.tolist()
        parts = self._ranks.exchange((total, skipped, self._tokens, self._flos, extra))
        means = [_mean(part[0], self._steps - part[1]) for part in parts]
        loss = sum(means) / len(means)
        if math.isfinite(loss):  # an interval without a loss is no interval with a loss of 0
            self._all_losses += loss * self._steps
            self._all_steps += self._steps
        self._has_drained = self._has_drained or self._steps > 0
        self._sums = self._zero.clone()
        self._steps, self._tokens, self._flos = 0, 0, 0.0
        return loss, sum(part[2] for part in parts), sum(part[3] for part in parts), [part[4] for part in parts]

    def mean_of_run(self) -> float:
        """The mean loss over the intervals that had a finite one. 0 before the first step, NaN where none had."""
        if self._all_steps:
            return self._all_losses / self._all_steps
        return math.nan if self._has_drained else 0.0

    def gather(self) -> dict[str, Any]:
        """The state, of all ranks. Collective."""
        mine = (*self._sums.tolist(), self._tokens, self._flos)
        return {
            "interval": [list(each) for each in self._ranks.exchange(mine)],
            "steps": self._steps,
            "run": [self._all_losses, self._all_steps],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """What `gather` gave. In a world of another size, ranks share the sums."""
        interval = state["interval"]
        world = self._ranks.world_size
        if len(interval) == world:
            loss, skipped, tokens, flos = interval[self._ranks.rank]
        else:
            loss, skipped = (sum(each[at] for each in interval) / len(interval) for at in (0, 1))
            tokens, flos = ((sum(each[at] for each in interval) if self._ranks.rank == 0 else 0) for at in (2, 3))
        self._sums = torch.tensor([loss, skipped], dtype=self._zero.dtype, device=self._zero.device)
        self._steps, self._tokens, self._flos = state["steps"], tokens, flos
        self._all_losses, self._all_steps = state["run"]


def _mean(total: float, count: float) -> float:
    """Where no loss was finite there is none to show but that."""
    return total / count if count > 0 else math.nan
