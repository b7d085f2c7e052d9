"""What a run achieves, added to its logs before any logger sees them: tokens and FLOPs for each second, and memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from ...errors import UsageError
from ..agree import Ranks
from ..events import TrainerCallback

__all__ = ["DefaultMetrics", "is_known", "is_summary", "is_training_log"]


class DefaultMetrics(TrainerCallback):
    """Adds to each training log, where they can be known:

    tokens: since the last log, over all ranks, from `state.num_input_tokens_seen`.
    tok_per_sec: these tokens by the wall-clock time since the last log (at first, since training began).
    total_flos: of the run so far, over all ranks.
    mfu: model FLOPs utilization: the FLOPs since the last log, by the time in steps, by `peak_hardware_flops`.
    peak_mem_allocated: bytes, a list with one number for each rank; where there is an accelerator.

    What the producer has put there stays. Evaluations and the summary at the end are left alone.

    peak_hardware_flops: FLOP/s of all ranks' hardware together, at the precision of the training. Without it, no mfu.
        For one device, dense bfloat16: A100 312e12, H100 SXM 989e12 (Source: NVIDIA's data sheets of these).
    clock: seconds, for tests.
    """

    on_error = "disable"
    collective_events = frozenset({"on_log_step"})

    def __init__(
        self, peak_hardware_flops: float | None = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if peak_hardware_flops is not None and not peak_hardware_flops > 0:
            raise UsageError(
                f"DefaultMetrics: peak_hardware_flops is {peak_hardware_flops!r}; give the FLOP/s of all ranks "
                "together, above 0, or None"
            )
        self.peak_hardware_flops = peak_hardware_flops
        self._clock = clock
        self._logged_at = clock()
        self._step_began: float | None = None
        self._step_seconds = 0.0
        self._tokens_seen = 0
        self._flos = 0.0

    def on_train_begin(self, state: Any, **kwargs: Any) -> None:
        self._step_began = None
        self._tokens_seen, self._flos = _tokens_seen(state), float(state.total_flos or 0)
        self._begin_interval()

    def on_step_begin(self, **kwargs: Any) -> None:
        self._step_began = self._clock()

    def on_step_end(self, **kwargs: Any) -> None:
        if self._step_began is not None:
            self._step_seconds += self._clock() - self._step_began
            self._step_began = None

    def on_log_step(self, state: Any, logs: MutableMapping[str, Any], ranks: Ranks, **kwargs: Any) -> None:
        # Before anything is decided by what a rank sees: all of them take part, always.
        memory = ranks.exchange(peak_memory_bytes())
        if not is_training_log(logs):
            return
        if any(each is not None for each in memory):
            logs.setdefault("peak_mem_allocated", [each or 0 for each in memory])
        self._add_tokens(state, logs)
        self._add_flos(state, logs)
        self._begin_interval()

    def _add_tokens(self, state: Any, logs: MutableMapping[str, Any]) -> None:
        tokens = _tokens_seen(state) - self._tokens_seen
        self._tokens_seen = _tokens_seen(state)
        if tokens <= 0:
            return
        logs.setdefault("tokens", tokens)
        seconds = self._clock() - self._logged_at
        if seconds > 0:
            logs.setdefault("tok_per_sec", round(tokens / seconds))

    def _add_flos(self, state: Any, logs: MutableMapping[str, Any]) -> None:
        total = float(logs.get("total_flos") or state.total_flos or 0)
        done, self._flos = total - self._flos, total
        if total:
            logs.setdefault("total_flos", total)
        if self.peak_hardware_flops is not None and done > 0 and self._step_seconds > 0:
            logs.setdefault("mfu", done / self._step_seconds / self.peak_hardware_flops)

    def _begin_interval(self) -> None:
        self._logged_at = self._clock()
        self._step_seconds = 0.0


def is_training_log(logs: Mapping[str, Any]) -> bool:
    """Whether `logs` tells of steps: not of an evaluation alone, and not the summary that ends a training."""
    return not is_summary(logs) and ("loss" in logs or not any(name.startswith("eval_") for name in logs))


def is_summary(logs: Mapping[str, Any]) -> bool:
    """Whether `logs` is what ends a training. Hugging Face's Trainer has a `train_runtime` in each log of steps, too,
    where it counts tokens (include_num_input_tokens_seen).
    """
    return "train_runtime" in logs and "loss" not in logs


def is_known(name: str, value: Any) -> bool:
    """Whether a metric says something. Trainers count 0 FLOPs where they do not know a model's."""
    return name != "total_flos" or bool(value)


def peak_memory_bytes() -> int | None:
    """The most that this process has had allocated on its accelerator; None without one that torch uses here."""
    torch = sys.modules.get("torch")
    for kind in ("cuda", "xpu"):
        device = getattr(torch, kind, None)
        if device is not None and device.is_initialized():
            return int(device.max_memory_allocated())
    return None


def _tokens_seen(state: Any) -> int:
    return int(getattr(state, "num_input_tokens_seen", 0) or 0)
