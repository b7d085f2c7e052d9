"""The most memory that each rank has used."""

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

__all__ = ["PeakMemory"]

_log = logging.getLogger(__name__)

HISTORY_ENTRIES = 100_000
"""Of allocations and frees, the newest, in a snapshot: what torch's own guide to snapshots records."""


class PeakMemory(TrainerCallback):
    """The most memory that torch has allocated on each rank's CUDA device since training began, at every log
    of steps.

    It is added to what is logged as `peak_mem_allocated`: bytes, one number for each rank. `peaks` keeps the same.

    Without CUDA nothing is called that: there the same list is `peak_rss`, the most memory that each rank's process
    has had resident since it began, as the operating system counts it, and a warning at the start says so. What needs
    CUDA (`show_details`, `enable_memory_snapshot`) does nothing then.

    summary_writer: a TensorBoard SummaryWriter; scalars `peak_memory_rank{i}`, in bytes (`peak_rss_rank{i}`).
    show_details: print torch's memory summary of rank 0 at the end of training.
    do_log: print the peaks, in GiB, at every log.
    enable_memory_snapshot: record each allocation with its stack from the beginning to the first log, and write it to
        `{file_prefix}_rank{rank}.pickle` in the run's output_dir, for https://pytorch.org/memory_viz. Every rank does.
        It slows training while it records; it ends at the first log, or else with training or the process.
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
        self.close()  # of a run that raised before its first log
        self.peaks = []
        self._source = source_of_this_process()
        if rank == 0 and self._source.note:
            _log.warning("PeakMemory: %s", self._source.note)
        self._source.reset()
        if self.enable_memory_snapshot and self._source.start_history(HISTORY_ENTRIES):
            self._snapshot = Path(getattr(args, "output_dir", None) or ".") / f"{self.file_prefix}_rank{rank}.pickle"
            # A producer that raises fires no on_train_end.
            atexit.register(self.close)

    def on_log_step(self, logs: dict[str, Any], ranks: Ranks | None = None, **kwargs: Any) -> None:
        now = (ranks or Alone()).exchange(self._source.peak_bytes())
        # Something else may have reset the device's counter since the last time.
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
        """Ends the memory history, and writes its snapshot. Nothing where there is none."""
        path, self._snapshot = self._snapshot, None
        if path is None:
            return
        atexit.unregister(self.close)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._source.end_history(path)


class MemorySource:
    """Where peaks come from: `key` of the logs, `tag` of TensorBoard, `words` for people, a `note` for the start."""

    key = tag = words = note = ""

    def peak_bytes(self) -> int:
        raise NotImplementedError

    def reset(self) -> None:
        """The peak is of what comes now, where it can be."""

    def details(self) -> str | None:
        return None

    def start_history(self, entries: int) -> bool:
        """Whether it records now."""
        return False

    def end_history(self, path: Path) -> None:
        """Writes the history, and ends it even where it cannot be written."""


class CudaMemory(MemorySource):
    """What torch's allocator has given out on the current device."""

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
    """What the operating system has kept in memory of this process at most."""

    key = tag = "peak_rss"
    words = "peak resident memory"
    note = "the run uses no CUDA device; it logs each process's peak resident memory, as peak_rss"

    def peak_bytes(self) -> int:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # elsewhere it counts in KiB


def source_of_this_process() -> MemorySource:
    """CUDA's where the process uses it: a run may well be on the CPU of a machine that has it."""
    torch = sys.modules.get("torch")  # a producer without torch has no CUDA memory of torch's
    return CudaMemory() if torch is not None and torch.cuda.is_initialized() else ProcessMemory()


def _in_gib(peaks: list[int]) -> str:
    return ", ".join(f"{peak / 2**30:.2f}" for peak in peaks) + " GiB"
