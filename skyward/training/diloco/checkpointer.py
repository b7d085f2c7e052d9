"""Saves of a server's state: when they are made, what they hold, and how the next server goes on with one."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping

import torch

from ...errors import UsageError
from .async_rounds import AsyncRounds
from .fragments import AgreedFragments
from .global_model import GlobalModel
from .guard import check_shapes
from .refusal import WorkerRefused
from .rounds import Rounds
from .saves import ServerSaves

_log = logging.getLogger(__name__)


class Checkpointer:
    """Saves of an exchange, whose lock the caller holds.

    Args:
        saves: Where the state is saved; None: nowhere.
        every: Rounds between two saves.
        rounds: The rounds.
        model: The global parameters. Without any, there is nothing to save yet.
        fragments: The fragments.
    """

    def __init__(
        self,
        saves: ServerSaves | None,
        *,
        every: int,
        rounds: Rounds | AsyncRounds,
        model: GlobalModel,
        fragments: AgreedFragments,
    ) -> None:
        self._saves, self._every = saves, every
        self._rounds, self._model, self._fragments = rounds, model, fragments
        self._is_async = isinstance(rounds, AsyncRounds)
        self.saved_round: int | None = None
        """Round of the newest save."""
        self.error = ""
        """Sentence that says why the present state is not saved; empty if nothing is wrong."""
        self.state_id = secrets.token_hex(8)
        """Name of the training, which its saves keep."""

    @property
    def can_save(self) -> bool:
        """Return whether there is a folder to save in."""
        return self._saves is not None

    def restore(self, *, now: float) -> None:
        """Go on with the newest save. Without one, save the state of the beginning.

        Raises:
            UsageError: The save is of another model, or of the other mode.
            CheckpointError: The save is broken, or the first one cannot be written.
        """
        state = None if self._saves is None else self._saves.load()
        if state is None:
            self.save()  # an error ends the start, and not a training
            return
        if self._model.tensors is not None:
            _check_same_model(self._model.tensors, state.tensors)
        is_async = bool(state.rounds.get("is_async", False))
        if is_async != self._is_async:
            raise UsageError(f"async_mode={not is_async}: the save is of the other mode; set async_mode={is_async}")
        self._rounds.load_state_dict(state.rounds["rounds"], now=now)
        self._model.restore(state.tensors, state.outer, state.rounds["residuals"], self._rounds.round)
        self._fragments.load_state_dict(state.rounds)
        self.saved_round = self._rounds.round
        self.state_id = str(state.rounds.get("state_id", self.state_id))  # older saves have none
        _log.info("goes on in round %d, from %s", self._rounds.round, state.path)

    def round_opened(self) -> None:
        """Save the state if it is time for that."""
        if self._rounds.round % self._every == 0:
            self.try_to_save()

    def try_to_save(self) -> None:
        """Save before anyone gets an answer, so that a server that is killed goes on where its workers are.

        A failed save does not end the training of all: only a server that dies before the next save loses rounds.
        Everyone is told: the log, `status`, and each worker with its answer.
        """
        try:
            self.save()
        except Exception as error:
            assert self._saves is not None
            last = "from its beginning" if self.saved_round is None else f"from round {self.saved_round}"
            self.error = (
                f"save_dir={self._saves.folder!r}: the server cannot save round {self._rounds.round}: "
                f"{error.__cause__ or error}; mend that, or if the server dies, training goes on {last}"
            )
            _log.error("%s", self.error)

    def save(self) -> str | None:
        """Save the state now; return the path, or None if there is no folder to save in, or no model yet.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._saves is None or self._model.tensors is None:
            return None
        rounds = {
            "rounds": self._rounds.state_dict(),
            **self._fragments.state_dict(),
            "residuals": self._model.residuals,
            "is_async": self._is_async,
            "state_id": self.state_id,
        }
        path = self._saves.save(self._rounds.round, self._model.tensors, self._model.outer.state_dict(), rounds)
        self.saved_round, self.error = self._rounds.round, ""
        return path


def _check_same_model(given: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Raise UsageError if a model differs from a saved one in names or shapes."""
    try:
        check_shapes("server", given, saved)
    except WorkerRefused as refusal:
        raise UsageError(f"model: the save is of another one ({refusal.message}); use another save_dir") from None
