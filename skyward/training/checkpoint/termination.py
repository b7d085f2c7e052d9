"""The end of a machine before the end of its run: a SIGTERM, or the announcement of its provider."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ...node.slot.runtime import instance_info
from ...values.topology import InstanceInfo

__all__ = ["RunTerminated", "Termination"]

_log = logging.getLogger(__name__)


class RunTerminated(SystemExit):
    """SIGTERM came; an emergency checkpoint is saved, and the process ends with 143 as the signal would have it."""

    def __init__(self, checkpoint: str | None) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.checkpoint = checkpoint


RunTerminated.__module__ = __package__


class Termination:
    """Listens for the end of this machine from `open` to `close`. It says nothing of other ranks' machines.

    Args:
        grace_s: how long an emergency save may take from the notice on.
        option: the option that turned this on, as a warning names it.
    """

    def __init__(self, *, grace_s: float, option: str) -> None:
        self._grace_s, self._option = grace_s, option
        self._at: float | None = None
        self._info: InstanceInfo | None = None
        self._before: Any = None
        self._is_handled = False

    def open(self, *, hears_provider: bool = False) -> None:
        """Handle SIGTERM, in a program's main thread only. hears_provider: listen for its announcement too."""
        self._at, self._info = None, instance_info() if hears_provider else None
        if threading.current_thread() is not threading.main_thread():
            _log.warning("%s: SIGTERM can be handled in a program's main thread only, not here", self._option)
            return
        self._is_handled = True
        self._before = signal.signal(signal.SIGTERM, self._on_sigterm)

    def close(self) -> None:
        """Restore the handler that was there. May be called again."""
        if self._is_handled:
            self._is_handled = False
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)

    @property
    def is_noticed(self) -> bool:
        """Whether this machine is about to go."""
        if self._at is None and self._info is not None and self._info.is_preempted:
            self._at = time.monotonic()
        return self._at is not None

    @property
    def left_s(self) -> float:
        """Seconds left of the grace time, above 0. It begins now where only other ranks have had a notice."""
        if self._at is None:
            self._at = time.monotonic()
        return max(0.1, self._at + self._grace_s - time.monotonic())

    def save_in_time(
        self, step: int, *, is_saved: bool, wait: Callable[[float], str | None], save: Callable[[], object]
    ) -> str | None:
        """Save the step before the machine goes, and return what `wait` gives at last.

        Args:
            is_saved: a save of the step was begun already.
            wait: waits for the pending save, for that many seconds at most.
            save: begins the save.
        """
        _log.warning("this run is being ended: saving step %d first", step)
        if not is_saved:
            wait(self.left_s)
            save()
        return wait(self.left_s)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._at is None:
            self._at = time.monotonic()
