"""Counters and times of a worker, for logs and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch


class WorkerMetrics:
    """Counters of a worker. Times are in seconds, sizes in 10^6 bytes."""

    def __init__(self) -> None:
        self.counts = {
            "sync_count": 0,
            "local_step": 0,
            "sync_retries": 0,
            "reconnections": 0,
            "dylu_adjustments": 0,
            "fragment_syncs": 0,
        }
        self._steps, self._began_at, self._waited_s = 0, 0.0, 0.0
        self._total_sync_time, self._last_sync_time, self.last_recv_mb = 0.0, 0.0, 0.0

    def begin(self) -> None:
        """Measure the speed from now on."""
        self._began_at, self._steps, self._waited_s = time.perf_counter(), 0, 0.0

    def count_step(self) -> None:
        """Count an inner step."""
        self._steps += 1
        self.counts["local_step"] += 1

    def count_sync(self, *, is_of_fragment: bool) -> None:
        """Count a synchronisation that has succeeded."""
        self.counts["sync_count"] += 1
        self.counts["fragment_syncs"] += is_of_fragment

    def count_wait(self, seconds: float) -> None:
        """Count the time of a synchronisation, in which training stood still."""
        self._waited_s += seconds
        self._total_sync_time += seconds
        self._last_sync_time = seconds

    @property
    def steps_per_second(self) -> float:
        """Inner steps per second since `begin`, without the time of synchronisations."""
        seconds = time.perf_counter() - self._began_at - self._waited_s
        return self._steps / seconds if self._steps and seconds > 0 else 0.0

    def for_log(self, *, last_send_mb: float, sync_every: int, num_fragments: int, dylu: bool) -> dict[str, float]:
        """Return all metrics by their names in a log."""
        values = {
            "sync_count": self.counts["sync_count"],
            "local_step": self.counts["local_step"],
            "total_sync_time": self._total_sync_time,
            "last_sync_time": self._last_sync_time,
            "last_send_mb": last_send_mb,
            "last_recv_mb": self.last_recv_mb,
            "steps_per_second": self.steps_per_second,
            "sync_every": sync_every,
        }
        if dylu:
            values["dylu_adjustments"] = self.counts["dylu_adjustments"]
        if num_fragments > 1:
            values |= {"num_fragments": num_fragments, "fragment_syncs": self.counts["fragment_syncs"]}
        values.update((name, count) for name, count in self.counts.items() if count and name not in values)
        return {f"diloco/{name}": value for name, value in values.items()}

    def state_dict(self) -> dict[str, float]:
        """Return the counters, as values for JSON."""
        return {**self.counts, "total_sync_time": self._total_sync_time}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with counters that `state_dict` returned. Other entries are left alone."""
        for name in self.counts:
            self.counts[name] = int(state.get(name, 0))
        self._total_sync_time = float(state["total_sync_time"])


class LossMean:
    """Mean of losses. Those of a GPU stay there until it is taken."""

    def __init__(self) -> None:
        self._sum: float | torch.Tensor = 0.0
        self._count = 0

    def add(self, loss: float | torch.Tensor) -> None:
        """Add a loss."""
        self._sum = self._sum + (loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._count += 1

    def take(self) -> dict[str, float]:
        """Return the mean as a figure, and begin again; nothing if there is none, or it is not finite."""
        mean = float(self._sum) / self._count if self._count else math.nan
        self._sum, self._count = 0.0, 0
        return {"loss": mean} if math.isfinite(mean) else {}
