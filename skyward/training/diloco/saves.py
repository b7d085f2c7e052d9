"""Saves of a server: its parameters, its outer optimizer and its rounds, as checkpoints of a run of one process."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import CheckpointSaveFailed
from ..agree import Alone
from ..checkpoint.coordinator import CheckpointCoordinator
from ..checkpoint.patterns import SharingPattern, StateComponent

KEPT_SAVES = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedServer:
    """State of a server when a round began."""

    path: str
    tensors: Mapping[str, torch.Tensor]
    outer: Mapping[str, Any]
    rounds: Mapping[str, Any]


@dataclass(slots=True)
class _SavedPart:
    state: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)


class ServerSaves:
    """Folder of saves: each is complete or not there, and is verified when it is loaded.

    The parameters are a safetensors file, `model.safetensors`, in the save's folder.

    Args:
        folder: Folder of the saves, which may not exist yet.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self._model, self._outer, self._rounds = _SavedPart(), _SavedPart(), _SavedPart()
        self._coordinator = CheckpointCoordinator(
            [
                StateComponent("model", self._model, SharingPattern.GLOBAL, metadata={"format": "safetensors"}),
                StateComponent("outer", self._outer, SharingPattern.GLOBAL),
                StateComponent("rounds", self._rounds, SharingPattern.GLOBAL),
            ],
            dist=Alone(),
            output_dir=self.folder,
        )

    def save(
        self,
        round_number: int,
        tensors: Mapping[str, torch.Tensor],
        outer: Mapping[str, Any],
        rounds: Mapping[str, Any],
    ) -> str:
        """Write the state at the beginning of a round, and return its path once it is durable.

        On a full disk all older saves but the newest are deleted, to make room for this one.

        Raises:
            CheckpointSaveFailed: It could not be written. The newest save before it is still there.
        """
        self._model.state, self._outer.state, self._rounds.state = dict(tensors), dict(outer), dict(rounds)
        try:
            path = self._coordinator.save_checkpoint(checkpoint_id=round_number)
        except CheckpointSaveFailed as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENOSPC):
                raise
            _log.warning("%s is full: older saves are deleted, to make room for round %d", self.folder, round_number)
            self._coordinator.files.prune(keep=1, protect=())
            path = self._coordinator.save_checkpoint(checkpoint_id=round_number)
        self._coordinator.files.prune(keep=KEPT_SAVES, protect=())
        return path

    def load(self) -> SavedServer | None:
        """Return the newest save; None if there is none.

        Raises:
            CheckpointCorrupt: A file of it is missing or changed.
        """
        path = self._coordinator.latest()
        if path is None:
            return None
        self._coordinator.load_checkpoint(path)
        return SavedServer(path=path, tensors=self._model.state, outer=self._outer.state, rounds=self._rounds.state)
