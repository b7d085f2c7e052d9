"""When a run's checkpoints are durable: at once, or behind training; and the one that is made before a machine goes."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from ...errors import UsageError
from ...slot.runtime import instance_info
from ...topology import InstanceInfo
from ..agree import Ranks
from ..arguments import TrainingArguments
from ..checkpoint import Checkpoints, FileCheckpoints, StateComponent

__all__ = ["Saved", "Saves", "Termination", "checkpoint_to_resume"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is durable. best: the path of the run's best one, as it was at that step."""

    path: str
    step: int
    best: str | None


class Saves:
    """The saves of one `train()`. All ranks make it and call it at the same places; one save is written at a time.

    What gives `Saved` tells of a checkpoint exactly once: when it is durable on all ranks.
    """

    def __init__(self, checkpoints: Checkpoints, args: TrainingArguments) -> None:
        self._checkpoints, self._args = checkpoints, args
        self._pending: tuple[int, str | None] | None = None
        self.begun_at = -1
        """The step of the newest save, durable or not."""

    @property
    def is_pending(self) -> bool:
        """Whether a save was begun that nobody has told of yet."""
        return self._pending is not None

    def is_left_out(self, *, is_needed: bool) -> bool:
        """Whether a save now is to be left out, since the one before it is still being written. Not collective."""
        return self.is_pending and not is_needed and self._args.save_on_busy == "skip"

    def begin(
        self,
        step: int,
        components: Sequence[StateComponent],
        *,
        groups: Mapping[str, Any],
        best: str | None,
        about: Mapping[str, Any],
    ) -> Saved | None:
        """Save. With `async_save` it returns None when the states are copied. No save may be pending.

        about: fields of the manifest.
        Raises: what the save raises; of one that is written behind training, `poll` and `wait` do.
        """
        assert self._pending is None
        if not self._args.async_save:
            path = self._checkpoints.save(step, components, process_groups=groups, metadata=about)
            self.begun_at = step
            return Saved(path=path, step=step, best=best)
        self._checkpoints.save_async(step, components, process_groups=groups, metadata=about)
        self.begun_at, self._pending = step, (step, best)
        return None

    def poll(self) -> Saved | None:
        """For every step: a save that has ended on all ranks meanwhile. Raises: what the save has, on all ranks."""
        if self._pending is None:
            return None
        return self._ended(self._checkpoints.poll)

    def wait(self, timeout_s: float | None = None) -> Saved | None:
        """Until the pending save is durable. Raises: as `poll`; CheckpointSaveFailed when the time is up."""
        if self._pending is None:
            return None
        return self._ended(lambda: self._checkpoints.wait(timeout_s))

    def close(self) -> None:
        """Where a run raises: waits for what is being written, so that it is not lost; its own error is logged only."""
        if self._pending is None:
            return
        try:
            self._checkpoints.wait()
        except Exception as error:
            _log.warning("the checkpoint of step %d was not written", self.begun_at, exc_info=error)
        self._pending = None

    def _ended(self, ask: Any) -> Saved | None:
        assert self._pending is not None
        step, best = self._pending
        try:
            path = ask()
        except Exception:
            self._pending = None
            raise
        if path is None:
            return None
        self._pending = None
        return Saved(path=path, step=step, best=best)


class Termination:
    """Whether this machine, or another rank's, is about to go: SIGTERM came, or its provider has announced it.

    Nothing is asked or handled where `enable_jit_checkpoint` is not set. Signals are handled from `__enter__` to
    `__exit__`, in a program's main thread only.
    """

    def __init__(self, args: TrainingArguments, ranks: Ranks) -> None:
        self._is_on, self._grace_s, self._ranks = args.enable_jit_checkpoint, args.jit_checkpoint_grace_s, ranks
        self._at: float | None = None
        self._before: Any = None
        self._handles = False
        self._info: InstanceInfo | None = None

    def __enter__(self) -> Self:
        if not self._is_on:
            return self
        self._info = instance_info()
        if threading.current_thread() is not threading.main_thread():
            _log.warning("enable_jit_checkpoint: SIGTERM can be handled in a program's main thread only, not here")
            return self
        self._handles = True
        self._before = signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handles:
            self._handles = False
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)

    def is_near(self) -> bool:
        """Of any rank. Collective where `enable_jit_checkpoint` is set: one small all-reduce."""
        if not self._is_on:
            return False
        if self._at is None and self._info is not None and self._info.is_preempted:
            self._at = time.monotonic()
        if not self._ranks.flags(0 if self._at is None else 1):
            return False
        if self._at is None:
            self._at = time.monotonic()
        return True

    @property
    def left_s(self) -> float:
        """Of the time that an emergency save may take. Above 0."""
        begun = time.monotonic() if self._at is None else self._at
        return max(0.1, begun + self._grace_s - time.monotonic())

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._at is None:
            self._at = time.monotonic()


def checkpoint_to_resume(
    asked: bool | str | os.PathLike[str] | None, args: TrainingArguments, checkpoints: Checkpoints, ranks: Ranks
) -> str | None:
    """The folder that a run goes on from; None: it begins. Clears what interrupted saves have left. Collective."""
    path: str | None = None
    asked = args.resume_from_checkpoint if asked is None else asked
    if asked is True or asked == "auto":
        path = ranks.share(checkpoints.latest())
        if path is None and asked is True:
            raise UsageError(
                f"resume_from_checkpoint=True: no checkpoint in {args.output_dir} to go on from; 'auto' begins where "
                "there is none"
            )
    elif asked is not None and asked is not False:
        path = os.fspath(asked)
    if isinstance(checkpoints, FileCheckpoints):
        checkpoints.sweep()
    return path
