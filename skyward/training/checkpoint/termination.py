"""Termination of a machine before the end of its run, by SIGTERM or announced by its provider."""

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

_log = logging.getLogger(__name__)


class RunTerminated(SystemExit):
    """Raised after SIGTERM, once an emergency checkpoint is saved. The process exits with 143, the signal's own code.

    Args:
        checkpoint: path of the emergency checkpoint; None if none was saved.

    Example:
        except RunTerminated as end:
            print("resume from", end.checkpoint)
            raise
    """

    def __init__(self, checkpoint: str | None) -> None:
        super().__init__(128 + signal.SIGTERM)
        self.checkpoint = checkpoint


RunTerminated.__module__ = __package__


class Termination:
    """Listener for the termination of this machine, from `open` to `close`. It does not cover other ranks' machines.

    Args:
        grace_s: seconds that an emergency save may take after the notice.
        option: name of the option that enabled it, for warnings.
    """

    def __init__(self, *, grace_s: float, option: str) -> None:
        self._grace_s, self._option = grace_s, option
        self._at: float | None = None
        self._info: InstanceInfo | None = None
        self._before: Any = None
        self._is_handled = False

    def open(self, *, hears_provider: bool = False) -> None:
        """Install a SIGTERM handler, in the main thread only.

        Args:
            hears_provider: listen for the provider's announcement too.
        """
        self._at, self._info = None, instance_info() if hears_provider else None
        if threading.current_thread() is not threading.main_thread():
            _log.warning("%s: cannot handle SIGTERM outside a program's main thread", self._option)
            return
        self._is_handled = True
        self._before = signal.signal(signal.SIGTERM, self._on_sigterm)

    def close(self) -> None:
        """Restore the previous handler. It can be called twice."""
        if self._is_handled:
            self._is_handled = False
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)

    @property
    def is_noticed(self) -> bool:
        """Return whether this machine is about to be terminated."""
        if self._at is None and self._info is not None and self._info.is_preempted:
            self._at = time.monotonic()
        return self._at is not None

    @property
    def left_s(self) -> float:
        """Seconds left of the grace time, above 0. It starts now if only other ranks have had a notice."""
        if self._at is None:
            self._at = time.monotonic()
        return max(0.1, self._at + self._grace_s - time.monotonic())

    def save_in_time(
        self, step: int, *, is_saved: bool, wait: Callable[[float], str | None], save: Callable[[], object]
    ) -> str | None:
        """Save the step before the machine goes, and return the path from the last `wait`.

        Args:
            step: number of the step.
            is_saved: whether a save of this step has started already.
            wait: waits for the pending save, for at most this many seconds.
            save: starts the save.
        """
        _log.warning("this machine is being terminated: saving step %d first", step)
        if not is_saved:
            wait(self.left_s)
            save()
        return wait(self.left_s)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        # Only note the time. A handler runs between any two instructions, possibly while this thread holds a lock of a
        # framework, so the save itself waits for the end of the step.
        if self._at is None:
            self._at = time.monotonic()
