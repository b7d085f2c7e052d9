"""Losses as an agent tells them to the client: which task had begun when its process died, and how it died."""

from __future__ import annotations

import json
import time

from ..slot.page import CURRENT
from .slots import SlotProcess
from .stacks import crash_of

_MAX_EARLY_DEATHS = 5


class Losses:
    """Losses of tasks on one node, and the deaths of processes that never completed one.

    Args:
        node: Number of the node.
    """

    def __init__(self, node: int) -> None:
        self._node = node
        self._early_deaths = 0
        self._dead_line: tuple[int, int, int, float | None] = (0, 0, 0, None)
        """Number, current task, exit code and exceeded limit of the latest dead slot that had a direct line."""

    @property
    def are_early(self) -> bool:
        """Return whether processes die one after another before they complete a task."""
        return self._early_deaths >= _MAX_EARLY_DEATHS

    def completed(self) -> None:
        """Note that a process has completed a task."""
        self._early_deaths = 0

    def died(self, slot: SlotProcess) -> None:
        """Note the death of a process for plain calls."""
        if not slot.finished_any:
            self._early_deaths += 1

    def note_line(self, slot: SlotProcess, code: int) -> None:
        """Remember what a dead process with a direct line was doing."""
        if slot.line_number:
            self._dead_line = slot.line_number, int(slot.page[CURRENT]), code, slot.exceeded_gib

    def on_line(self, task: int, number: int) -> bytes:
        """Describe the loss of a task that was on the direct line of that number."""
        dead, current_task, code, exceeded_gib = self._dead_line
        # Only the latest death is remembered. After an older one the task counts as begun, so nobody runs it twice.
        has_begun = dead != number or current_task == task
        return self.body(0 if has_begun else None, code, exceeded_gib=exceeded_gib)

    def of(self, task: int, slot: SlotProcess | None, code: int) -> bytes:
        """Describe the loss of a task. `slot` is None if the task never had a process."""
        if slot is None:
            return self.body(None, code)
        index = slot.begun_index(task)
        return self.body(index, code, crash_of(slot), why=slot.failure, exceeded_gib=slot.exceeded_gib)

    def body(
        self,
        index: int | None,
        code: int,
        crash: tuple[float, str] | None = None,
        *,
        why: str = "",
        exceeded_gib: float | None = None,
    ) -> bytes:
        """Return the body of a LOST frame.

        Args:
            index: Index of the call in a chunk that had begun; None if none had.
            code: Exit code of the process, or the negative number of its signal.
            crash: Time and stack of a crash.
            why: Reason in words, if it is known.
            exceeded_gib: Memory limit that the process exceeded.
        """
        if index is None and self.are_early:
            index = 0  # report it as begun: every process dies before it begins, so retries would never end
        lost: dict[str, object] = {
            "node": self._node,
            "signal": -code if code < 0 else None,
            "exit_code": code if code >= 0 else None,
            "started": index is not None,
            "index": index,
            "at": time.time() if crash is None else crash[0],
            "stack": "" if crash is None else crash[1],
            "why": why,
            "memory_gib": exceeded_gib,
        }
        return json.dumps(lost).encode()
