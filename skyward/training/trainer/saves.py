"""When a run's checkpoints are durable: at once, or behind training."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError
from ..agree import Ranks
from ..arguments import TrainingArguments
from ..checkpoint import Checkpoints, FileCheckpoints, StateComponent

__all__ = ["Saved", "Saves", "checkpoint_to_resume"]

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
