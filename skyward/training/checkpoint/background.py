"""Saves behind training: it is blocked for the snapshot only; writing and agreeing happen in a thread.

What passes between the ranks meanwhile goes over a gloo group of its own, so it meets no collective of training.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

from ...errors import CheckpointSaveFailed
from ..agree import Alone, Ranks, TorchRanks
from ..snapshot import Snapshot, SnapshotPool, common_pool
from .saving import SaveRequest, perform_save

__all__ = ["BackgroundSaves", "OnBusy"]

OnBusy = Literal["wait", "skip"]
"""What a save does while the one before it is being written: it waits for it, or is left out, on all ranks alike."""


class BackgroundSaves:
    """One save at a time. All ranks make it, and call `start`, `poll` and `wait`, at the same places.

    after: called on every rank in the thread after a commit, with its path.
    """

    def __init__(self, ranks: Ranks, *, pool: SnapshotPool | None = None) -> None:
        self._ranks = ranks
        self._own: Ranks = TorchRanks() if ranks.world_size > 1 else Alone()
        self._pool = pool or common_pool()
        self._thread: threading.Thread | None = None
        self._path: str | None = None
        self._error: BaseException | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a save was begun that `poll` or `wait` has not seen end. The same on all ranks."""
        return self._thread is not None

    def start(
        self,
        request: SaveRequest,
        states_here: Callable[[], Any],
        *,
        on_busy: OnBusy = "wait",
        after: Callable[[str], None] | None = None,
    ) -> bool:
        """Takes a snapshot and writes it behind the caller. False where it was left out. Collective.

        Raises: what the save before it has.
        """
        self.poll()
        if self.is_pending:
            if on_busy == "skip":
                return False
            self.wait()
        taken = _Taken()
        self._path = self._error = None
        self._thread = threading.Thread(
            target=self._save, args=(request, taken, after), name=f"save {request.name}", daemon=False
        )
        # Before the copy: one that starts holds the interpreter for its first milliseconds, and would do so at once.
        try:
            self._thread.start()
            taken.fill(lambda: self._pool.take(states_here(), moment=request.about.get("step")))
        finally:
            taken.settle()  # Ctrl-C may come between the two
        return True

    def poll(self) -> str | None:
        """Cheap, for every step: the path of a save that has ended on all ranks meanwhile; None while there is none.

        Collective (one small all-reduce) while a save is pending, and nothing otherwise. Raises: what the save has.
        """
        if self._thread is None:
            return None
        if self._ranks.flags(1 if self._thread.is_alive() else 0):
            return None
        return self._end()

    def wait(self, timeout_s: float | None = None) -> str | None:
        """Until the pending save has ended: its path; None where there was none.

        Raises: what the save has; CheckpointSaveFailed when the time is up.
        """
        if self._thread is None:
            return None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointSaveFailed(
                f"{self._thread.name}: not durable within {timeout_s:g} s; the last checkpoint is as it was",
                rank=self._ranks.rank,
                error="too slow",
            )
        return self._end()

    def _save(self, request: SaveRequest, taken: _Taken, after: Callable[[str], None] | None) -> None:
        try:
            self._path = perform_save(self._own, request, taken.state)
            if after is not None:
                after(self._path)
        except BaseException as error:
            self._error = error
        finally:
            taken.release()

    def _end(self) -> str | None:
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._path


class _Taken:
    """A snapshot that is there soon, or what prevented it."""

    def __init__(self) -> None:
        self._is_filled = threading.Event()
        self._snapshot: Snapshot | None = None
        self._error: Exception | None = None

    def fill(self, take: Callable[[], Snapshot]) -> None:
        """Raises: what ends a process (KeyboardInterrupt). Errors are said where the other ranks wait for them."""
        try:
            self._snapshot = take()
        except BaseException as error:
            self._error = error if isinstance(error, Exception) else InterruptedError("while the states were copied")
            if self._error is not error:
                raise
        finally:
            self._is_filled.set()

    def settle(self) -> None:
        """Nobody fills it any more."""
        if not self._is_filled.is_set():
            self._error = InterruptedError("before the states were copied")
            self._is_filled.set()

    def state(self) -> Any:
        """Waits for it. Raises: what `take` did."""
        self._is_filled.wait()
        if self._error is not None:
            raise self._error
        assert self._snapshot is not None
        return self._snapshot.state

    def release(self) -> None:
        if self._snapshot is not None:
            self._snapshot.release()
