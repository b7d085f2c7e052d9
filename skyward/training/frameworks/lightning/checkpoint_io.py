"""Lightning's checkpoints in our format: staged, with digests, committed atomically.

    lightning.Trainer(..., plugins=[lightning_checkpoint_io()])

Lightning calls the plugin on the rank that writes, with everything in one dict. Such a checkpoint has one component,
`lightning`. `ModelCheckpoint`, `ckpt_path=` and the rest of Lightning work as usual, and `skyward checkpoint verify`
works too.
"""

from __future__ import annotations

import os
from typing import Any

from ....stores.folders import folder_at
from ...agree import Alone
from ...checkpoint.coordinator import CheckpointCoordinator
from ...checkpoint.patterns import SharingPattern, StateComponent
from ...checkpoint.retention import delete_checkpoint


class _Whole:
    """Component with everything that Lightning saves."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any, /) -> None:
        self.state = state_dict


def lightning_checkpoint_io(*, allow_pickle: bool = False) -> Any:
    """Make a plugin for `lightning.Trainer` that writes checkpoints in our format.

    Args:
        allow_pickle: save and load objects of any class, for modules' hyperparameters or callbacks' states that contain
            them. Loading such a checkpoint can run code.

    Returns:
        A `CheckpointIO`.

    Example:
        Save and resume with our checkpoints::

            trainer = lightning.Trainer(max_epochs=3, plugins=[lightning_checkpoint_io()])
            trainer.fit(module, loader, ckpt_path="last")
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
