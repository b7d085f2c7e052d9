"""Peak memory of each rank, in the logs."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..agree import Alone, Ranks
from ..events import TrainerCallback
from .lines import write_line
from .metrics import is_training_log

_log = logging.getLogger(__name__)

HISTORY_ENTRIES = 100_000
"""Newest allocations and frees in a snapshot; the number that torch's guide to memory snapshots uses."""


class PeakMemory(TrainerCallback):
    """Log the peak CUDA memory of each rank since training began.

    Each step's log gets `peak_mem_allocated`: bytes that torch allocated, a list with one number per rank. `peaks` has
    the same list.

    Without CUDA the list is logged as `peak_rss` instead: the peak resident memory of each rank's process since it
    began, as the operating system counts it. A warning at the start says so, and the options that need CUDA
    (`show_details`, `enable_memory_snapshot`) do nothing.

    Args:
        summary_writer: a TensorBoard SummaryWriter for the scalars `peak_memory_rank{i}` (or `peak_rss_rank{i}`), in
            bytes.
        show_details: print torch's memory summary of rank 0 when training ends.
        do_log: print the peaks, in GiB, at every log.
        enable_memory_snapshot: on every rank, record each allocation with its stack from the start to the first log.
            It goes to `{file_prefix}_rank{rank}.pickle` in the run's output_dir, for https://pytorch.org/memory_viz.
            Recording slows training. It ends at the first log, at the latest with training or the process.
        file_prefix: beginning of the snapshot's file name.

    Example:
        >>> PeakMemory(do_log=True).peaks
        []
    """

    on_error = "disable"
    collective_events = frozenset({"on_log_step"})

    def __init__(
        self,
        summary_writer: Any = None,
        show_details: bool = False,
        do_log: bool = False,
        enable_memory_snapshot: bool = False,
        file_prefix: str = "memory_snapshot",
    ) -> None:
        self.summary_writer = summary_writer
        self.show_details, self.do_log = show_details, do_log
        self.enable_memory_snapshot, self.file_prefix = enable_memory_snapshot, file_prefix
        self.peaks: list[int] = []
        self._source: MemorySource = ProcessMemory()
        self._snapshot: Path | None = None

    def on_train_begin(self, args: Any, ranks: Ranks | None = None, **kwargs: Any) -> None:
        rank = (ranks or Alone()).rank
        self.close()  # a previous run may have raised before its first log
        self.peaks = []
        self._source = source_of_this_process()
        if rank == 0 and self._source.note:
            _log.warning("PeakMemory: %s", self._source.note)
        self._source.reset()
        if self.enable_memory_snapshot and self._source.start_history(HISTORY_ENTRIES):
            self._snapshot = Path(getattr(args, "output_dir", None) or ".") / f"{self.file_prefix}_rank{rank}.pickle"
            # A producer that raises never fires on_train_end.
            atexit.register(self.close)

    def on_log_step(self, logs: dict[str, Any], ranks: Ranks | None = None, **kwargs: Any) -> None:
        now = (ranks or Alone()).exchange(self._source.peak_bytes())
        # Other code may reset the device's counter between logs, so the peak is kept here.
        self.peaks = [max(pair) for pair in zip(now, self.peaks or now, strict=True)]
        if is_training_log(logs):
            logs[self._source.key] = list(self.peaks)

    def on_log(
        self, state: Any, logs: Mapping[str, Any] | None = None, ranks: Ranks | None = None, **kwargs: Any
    ) -> None:
        self.close()
        if (ranks or Alone()).rank != 0 or not self.peaks or not is_training_log(logs or {}):
            return
        if self.do_log:
            write_line(f"step {state.global_step}, {self._source.words}: {_in_gib(self.peaks)}")
        if self.summary_writer is not None:
            for rank, peak in enumerate(self.peaks):
                self.summary_writer.add_scalar(f"{self._source.tag}_rank{rank}", peak, global_step=state.global_step)

    def on_train_end(self, ranks: Ranks | None = None, **kwargs: Any) -> None:
        self.close()
        details = self._source.details() if self.show_details and (ranks or Alone()).rank == 0 else None
        if details is not None:
            write_line(f"memory of rank 0:\n{details}")

    def close(self) -> None:
        """Stop the memory history, if one is recorded, and write its snapshot."""
        path, self._snapshot = self._snapshot, None
        if path is None:
            return
        atexit.unregister(self.close)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._source.end_history(path)


class MemorySource:
    """Source of peaks: `key` in logs, `tag` in TensorBoard, `words` for people, a `note` for the start of a run."""

    key = tag = words = note = ""

    def peak_bytes(self) -> int:
        raise NotImplementedError

    def reset(self) -> None:
        """Begin a new peak, where the source can."""

    def details(self) -> str | None:
        return None

    def start_history(self, entries: int) -> bool:
        """Start recording allocations; return whether the source can."""
        return False

    def end_history(self, path: Path) -> None:
        """Write the history and stop recording, even if the file cannot be written."""


class CudaMemory(MemorySource):
    """Peak of torch's CUDA allocator on the current device."""

    key, tag, words = "peak_mem_allocated", "peak_memory", "peak allocated memory"

    def peak_bytes(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated()

    def reset(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def details(self) -> str | None:
        import torch

        return torch.cuda.memory_summary()

    def start_history(self, entries: int) -> bool:
        import torch

        torch.cuda.memory._record_memory_history(max_entries=entries)
        return True

    def end_history(self, path: Path) -> None:
        import torch

        try:
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)


class ProcessMemory(MemorySource):
    """Peak resident memory of this process, as the operating system counts it."""

    key = tag = "peak_rss"
    words = "peak resident memory"
    note = "the run uses no CUDA device; it logs each process's peak resident memory, as peak_rss"

    def peak_bytes(self) -> int:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes


def source_of_this_process() -> MemorySource:
    """Return CUDA's peaks if this process uses CUDA; a run on a machine with a GPU may still be on the CPU."""
    torch = sys.modules.get("torch")  # without torch in the process there is no CUDA memory to read
    return CudaMemory() if torch is not None and torch.cuda.is_initialized() else ProcessMemory()


def _in_gib(peaks: list[int]) -> str:
    return ", ".join(f"{peak / 2**30:.2f}" for peak in peaks) + " GiB"
