"""Throughput and memory metrics, added to a run's logs before any logger sees them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from ...errors import UsageError
from ..agree import Ranks
from ..events import TrainerCallback


class DefaultMetrics(TrainerCallback):
    """Add throughput, FLOPs and memory to each training log.

    Each value is added where it can be known, and never replaces one that the producer set:

    - `tokens`: tokens since the last log over all ranks, from `state.num_input_tokens_seen`
    - `tok_per_sec`: those tokens per second of wall-clock time
    - `total_flos`: FLOPs of the run so far over all ranks
    - `mfu`: model FLOPs utilization, the FLOPs since the last log per second spent in steps / `peak_hardware_flops`
    - `peak_mem_allocated`: peak bytes on the accelerator, a list with one number per rank

    Evaluations and the final summary stay as they are. Put this callback before the ones that write logs.

    Args:
        peak_hardware_flops: FLOP/s of all ranks' devices together, at the training precision; None leaves `mfu` out.
            One device, dense bfloat16: A100 312e12, H100 SXM 989e12 (Source: NVIDIA's data sheets).
        clock: monotonic seconds, for tests.

    Raises:
        UsageError: `peak_hardware_flops` is not above 0.

    Example:
        >>> DefaultMetrics(peak_hardware_flops=8 * 989e12).peak_hardware_flops
        7912000000000000.0
    """

    on_error = "disable"
    collective_events = frozenset({"on_log_step"})

    def __init__(
        self, peak_hardware_flops: float | None = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if peak_hardware_flops is not None and not peak_hardware_flops > 0:
            raise UsageError(
                f"DefaultMetrics.peak_hardware_flops={peak_hardware_flops!r}: must be above 0; "
                "set the FLOP/s of all ranks together, or None"
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
        # The exchange comes before any decision that depends on this rank's view, so that every rank takes part.
        memory = ranks.exchange(peak_memory_bytes())
        if not is_training_log(logs):
            return
        if any(peak is not None for peak in memory):
            logs.setdefault("peak_mem_allocated", [peak or 0 for peak in memory])
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
    """Return whether `logs` is about training steps, and not only an evaluation or the final summary."""
    return not is_summary(logs) and ("loss" in logs or not any(name.startswith("eval_") for name in logs))


def is_summary(logs: Mapping[str, Any]) -> bool:
    """Return whether `logs` is the summary that ends a training.

    A `train_runtime` alone does not say so: with include_num_input_tokens_seen, Hugging Face's Trainer has one in each
    step's log. Those also have a `loss`.
    """
    return "train_runtime" in logs and "loss" not in logs


def is_known(name: str, value: Any) -> bool:
    """Return whether a metric has a real value; trainers report 0 FLOPs for models that they cannot count."""
    return name != "total_flos" or bool(value)


def peak_memory_bytes() -> int | None:
    """Return this process's peak allocation on its accelerator, or None if torch uses none here."""
    torch = sys.modules.get("torch")
    for kind in ("cuda", "xpu"):
        device = getattr(torch, kind, None)
        if device is not None and device.is_initialized():
            return int(device.max_memory_allocated())
    return None


def _tokens_seen(state: Any) -> int:
    return int(getattr(state, "num_input_tokens_seen", 0) or 0)
