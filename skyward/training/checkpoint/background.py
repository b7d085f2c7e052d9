"""A save behind training: training is blocked for the snapshot only; a thread writes it and agrees with other ranks.

What passes between the ranks meanwhile goes over a gloo group of its own, so it meets no collective of training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

from ...errors import CheckpointSaveFailed
from ..agree import Ranks
from ..snapshot import Snapshot
from .save import SaveRequest, perform_save

__all__ = ["BackgroundSave", "OnBusy"]

OnBusy = Literal["wait", "skip"]
"""What a save does while the one before it is being written: it waits for it, or is left out, on all ranks alike."""


class BackgroundSave:
    """One save of all ranks, in a thread of each.

    Args:
        ranks: what the threads talk over; no other save may use it meanwhile.
        after: called on every rank in the thread after the commit, with the checkpoint's path.
    """

    def __init__(self, ranks: Ranks, request: SaveRequest, *, after: Callable[[str], None] | None = None) -> None:
        self._ranks, self._request, self._after = ranks, request, after
        self._is_copied = threading.Event()
        self._snapshot: Snapshot | None = None
        self._copy_error: Exception | None = None
        self._path = ""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._save, name=f"save {request.name}", daemon=False)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self, copy: Callable[[], Snapshot]) -> None:
        """Write the snapshot that `copy` takes, and return when it is taken.

        Raises: what ends a process (KeyboardInterrupt). Errors of `copy` fail the save on all ranks: see `path`.
        """
        try:
            # Before the copy: a thread that starts holds the interpreter for its first milliseconds, at once.
            self._thread.start()
            try:
                self._snapshot = copy()
            except Exception as error:
                self._copy_error = error  # raised where the other ranks wait for this one
        finally:
            self._is_copied.set()

    def path(self, timeout_s: float | None = None) -> str:
        """Wait for the end, and return the path of the checkpoint.

        Raises: what the save raised, the same on all ranks; CheckpointSaveFailed when the time is up.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointSaveFailed(
                f"{self._thread.name}: not durable within {timeout_s:g} s; the last checkpoint is as it was",
                rank=self._ranks.rank,
                error="too slow",
            )
        if self._error is not None:
            raise self._error
        return self._path

    def _save(self) -> None:
        try:
            self._path = perform_save(self._ranks, self._request, self._states)
            if self._after is not None:
                self._after(self._path)
        except BaseException as error:
            self._error = error
        finally:
            if self._snapshot is not None:
                self._snapshot.release()

    def _states(self) -> Any:
        self._is_copied.wait()
        if self._copy_error is not None:
            raise self._copy_error
        if self._snapshot is None:
            raise InterruptedError("interrupted while the states were copied")
        return self._snapshot.state
