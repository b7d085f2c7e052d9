"""Lightning's checkpoints written as ours: staged, digested, committed as one.

    lightning.Trainer(..., plugins=[lightning_checkpoint_io()])

Lightning calls it on the rank that writes, with everything in one dict: a checkpoint is one component, `lightning`.
`ModelCheckpoint`, `ckpt_path=` and the rest of Lightning work as they do; `skyward checkpoint verify` works too.
"""

from __future__ import annotations

import os
from typing import Any

from ...agree import Alone
from ...checkpoint.coordinator import CheckpointCoordinator
from ...checkpoint.folders import folder_at
from ...checkpoint.patterns import SharingPattern, StateComponent
from ...checkpoint.retention import delete_checkpoint

__all__ = ["lightning_checkpoint_io"]


class _Whole:
    """All that Lightning keeps."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any, /) -> None:
        self.state = state_dict


def lightning_checkpoint_io(*, allow_pickle: bool = False) -> Any:
    """A plugin for `lightning.Trainer`. allow_pickle: save and load objects of any class, where a module's
    hyperparameters or a callback's state have such. Loading them can run code.
    """
    from lightning.fabric.plugins import CheckpointIO

    class SkywardCheckpointIO(CheckpointIO):  # type: ignore[misc]  # it is Any to mypy here
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            _coordinator(_Whole(checkpoint), allow_pickle=allow_pickle).save_checkpoint(os.fspath(path))

        def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
            whole = _Whole()
            _coordinator(whole, allow_pickle=allow_pickle).load_checkpoint(os.fspath(path))
            return whole.state

        def remove_checkpoint(self, path: Any) -> None:
            delete_checkpoint(folder_at(os.fspath(path)))

    return SkywardCheckpointIO()


def _coordinator(whole: _Whole, **options: Any) -> CheckpointCoordinator:
    component = StateComponent("lightning", whole, SharingPattern.GLOBAL)
    return CheckpointCoordinator([component], None, Alone(), **options)
