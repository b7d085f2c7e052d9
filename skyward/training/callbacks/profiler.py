"""Profile of a few training steps, by torch's profiler."""

from __future__ import annotations

import atexit
import logging
import os
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ..agree import Alone, Ranks
from ..events import TrainerCallback

_log = logging.getLogger(__name__)

ROWS = 50
"""Rows of a summary table; operators below them take too little time to matter."""


class ProfilerCallback(TrainerCallback):
    """Profile a window of training steps on every rank.

    The window has `num_steps` steps after the first `start_step` of this process; a resumed run is profiled again.
    Every rank writes two files to `output_dir`:

    - `trace_rank{rank}.json`: a Chrome trace, for https://ui.perfetto.dev or chrome://tracing
    - `summary_rank{rank}.txt`: operators sorted by their own time, on the CPU and, if there is one, on the device

    The files are written when the window ends. If training or the process ends inside the window, they hold the steps
    so far. Nothing is recorded before the window, and the profiler is closed after it.

    Args:
        start_step: steps before the window, at least 0. The last of them warms the profiler up.
        num_steps: steps in the window, at least 1. A trace takes tens of MB per step of a large model.
        output_dir: folder of the files; None means `profiler` in the run's logging_dir, or else in its output_dir.
        with_stack: record the Python stack of each operator; without it steps are slowed less.
        with_flops: estimate the FLOPs of each operator.
        record_shapes: record the shapes of each operator's inputs.

    Raises:
        UsageError: `start_step` or `num_steps` is out of its range.

    Example:
        >>> ProfilerCallback(start_step=10, num_steps=2, with_stack=False).num_steps
        2
    """

    on_error = "disable"

    def __init__(
        self,
        start_step: int = 3,
        num_steps: int = 5,
        output_dir: str | os.PathLike[str] | None = None,
        with_stack: bool = True,
        with_flops: bool = True,
        record_shapes: bool = True,
    ) -> None:
        if start_step < 0:
            raise UsageError(
                f"ProfilerCallback.start_step={start_step!r}: must be at least 0; set start_step=0 or more"
            )
        if num_steps < 1:
            raise UsageError(f"ProfilerCallback.num_steps={num_steps!r}: must be at least 1; set num_steps=1 or more")
        self.start_step, self.num_steps, self.output_dir = start_step, num_steps, output_dir
        self.with_stack, self.with_flops, self.record_shapes = with_stack, with_flops, record_shapes
        self._profile: Any = None
        self._folder = Path()
        self._rank = 0
        self._steps = 0
        self._is_in_step = False

    def on_train_begin(self, args: Any, ranks: Ranks | None = None, **kwargs: Any) -> None:
        self.close()  # a previous run may have raised inside the window
        self._rank = (ranks or Alone()).rank
        self._folder = self._chosen_folder(args)
        self._steps, self._is_in_step = 0, False
        self._profile = self._begin()
        # A producer that raises never fires on_train_end.
        atexit.register(self.close)

    def on_step_begin(self, **kwargs: Any) -> None:
        self._is_in_step = True

    def on_step_end(self, **kwargs: Any) -> None:
        self._is_in_step = False
        if self._profile is None:
            return
        self._steps += 1
        if self._steps == self.start_step + self.num_steps:
            self.close()
        else:
            self._profile.step()

    def on_train_end(self, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop profiling and write the recorded steps, unless that has happened. Call from the training's thread."""
        profile, self._profile = self._profile, None
        atexit.unregister(self.close)
        if profile is None:
            return
        profile.stop()
        recorded = self._steps - self.start_step
        if recorded > 0 or (recorded == 0 and self._is_in_step):
            self._write(profile, recorded)

    def _begin(self) -> Any:
        import torch
        from torch import profiler

        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        elif hasattr(torch, "xpu") and torch.xpu.is_available():
            activities.append(profiler.ProfilerActivity.XPU)
        profile = profiler.profile(
            activities=activities,
            schedule=self._schedule,
            record_shapes=self.record_shapes,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
        )
        profile.start()
        return profile

    def _schedule(self, step: int) -> Any:
        """Return the action for a step. torch's own schedule warns about a window without a warm-up step."""
        from torch.profiler import ProfilerAction

        end = self.start_step + self.num_steps
        if step < self.start_step - 1 or step >= end:
            return ProfilerAction.NONE
        if step < self.start_step:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD_AND_SAVE if step == end - 1 else ProfilerAction.RECORD

    def _write(self, profile: Any, recorded: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"trace_rank{self._rank}.json"
        unfinished = trace.with_name(f".{trace.stem}.{os.getpid()}.json")
        try:
            profile.export_chrome_trace(str(unfinished))
            unfinished.replace(trace)
        finally:
            unfinished.unlink(missing_ok=True)
        summary = self._folder / f"summary_rank{self._rank}.txt"
        summary.write_text(self._summary(profile, recorded), encoding="utf-8")
        _log.info("profiled %d steps: %s, %s", recorded, trace, summary)

    def _summary(self, profile: Any, recorded: int) -> str:
        averages = profile.key_averages()
        orders = ["self_cpu_time_total"]
        if any(getattr(average, "self_device_time_total", 0) for average in averages):
            orders.append("self_device_time_total")
        tables = (f"{order}, {recorded} steps\n{averages.table(sort_by=order, row_limit=ROWS)}" for order in orders)
        return "\n\n".join(tables) + "\n"

    def _chosen_folder(self, args: Any) -> Path:
        if self.output_dir is not None:
            return Path(self.output_dir)
        run = getattr(args, "logging_dir", None) or getattr(args, "output_dir", None) or "."
        return Path(run) / "profiler"
