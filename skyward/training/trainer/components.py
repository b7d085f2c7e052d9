"""Checkpoints of a Trainer: the parts that they consist of, and the methods that load and save them."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from ..agree import Ranks
from ..arguments import TrainingArguments
from ..bus import CallbackHandler
from ..checkpoint import Checkpoints, ModelState, OptimizerState, RNGState, SharingPattern, StateComponent
from .optimization import Scheduler
from .precision import Precision
from .run import TrainerRun
from .saver import CheckpointParts, Saver, save_weights
from .stream import Stream
from .world import is_sharded


class Checkpointed:
    """Base of `Trainer` with everything about its checkpoints."""

    args: TrainingArguments
    ranks: Ranks
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Scheduler | None
    callback_handler: CallbackHandler
    _run: TrainerRun
    _saver: Saver
    _stream: Stream | None
    _precision: Precision

    @property
    def checkpoints(self) -> Checkpoints:
        """Storage of the checkpoints."""
        return self._saver.checkpoints

    @checkpoints.setter
    def checkpoints(self, checkpoints: Checkpoints) -> None:
        self._saver.checkpoints = checkpoints

    def get_state_components(self, *, for_saving: bool = False) -> list[StateComponent]:
        """Return the parts of a checkpoint of this run; valid while `train` runs.

        Args:
            for_saving: obey `save_only_model`, which saves the model alone.
        """
        model, shared = self._model_component(), self._shared_pattern()
        if for_saving and self.args.save_only_model:
            return [model]
        assert self._stream is not None
        assert self.lr_scheduler is not None
        assert self.optimizer is not None
        is_cut = is_sharded(self.model)
        optimizer = OptimizerState(self.model, self.optimizer, whole=True) if is_cut else self.optimizer
        parts: list[tuple[str, Any, SharingPattern]] = [
            ("optimizer", optimizer, shared),
            ("scheduler", self.lr_scheduler, shared),
            ("scaler", self._precision, shared),
            ("dataset", self._stream, self._stream.sharing_pattern),
            ("callbacks", self.callback_handler, SharingPattern.GLOBAL),
            ("trainer", self._run, SharingPattern.GLOBAL),
            ("rng", RNGState(), SharingPattern.PER_RANK),
        ]
        return [model, *(self._component(key, part, how) for key, part, how in parts)]

    def get_process_groups(self) -> dict[str, Any]:
        """Return the process groups that components name: none."""
        return {}

    def _shared_pattern(self) -> SharingPattern:
        # The state of a sharded model is gathered on rank 0, so it is saved once, as with one rank.
        is_replicated = self.ranks.world_size > 1 and not is_sharded(self.model)
        return SharingPattern.REPLICATED if is_replicated else SharingPattern.GLOBAL

    def _model_component(self) -> StateComponent:
        model = ModelState(self.model, whole=True) if is_sharded(self.model) else self.model
        return self._component("model", model, self._shared_pattern())

    def _component(self, key: str, stateful: Any, pattern: SharingPattern) -> StateComponent:
        # Every save compares the replicas of model and optimizer, which finds ranks that have drifted apart.
        is_compared = pattern is SharingPattern.REPLICATED and key in ("model", "optimizer")
        return StateComponent(key, stateful, pattern, validate_replication=is_compared)

    def load_checkpoint(
        self,
        path: bool | str | os.PathLike[str],
        strict: bool = True,
        *,
        only: Collection[str] | None = None,
        skip: Collection[str] = (),
    ) -> None:
        """Load the model of a checkpoint now, and the rest when `train` begins and resumes from it. Collective.

        `train(resume_from_checkpoint=...)` replaces this choice.

        Args:
            path: a folder, True (the newest) or "auto" (the newest, if there is one), as in TrainingArguments.
            strict: raise if the checkpoint lacks a component. False: log a warning and leave the component as it is.
            only: keys of the components to load, such as "model", "optimizer" or "dataset"; None: all. With
                `only=["model"]` a new run begins at step 0 with these weights.
            skip: keys of components not to load.

        Raises:
            UsageError: there is no checkpoint or no such component; the latter is raised when `train` begins.
            CheckpointNotFound: the folder has no checkpoint. This error and the next two are raised on all ranks,
                before anything is changed.
            CheckpointCorrupt: a file is damaged.
            CheckpointMismatch: a state does not fit this run.
        """
        chosen = self._saver.choose(path, CheckpointParts(strict=strict, only=only, skip=skip))
        if chosen is not None and "model" not in skip and (only is None or "model" in only):
            groups = self.get_process_groups()
            self.checkpoints.load(chosen, [self._model_component()], strict=strict, process_groups=groups)

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write the weights by the model's `save_pretrained`, else as model.safetensors. Collective.

        Args:
            output_dir: folder to write to; None: `args.output_dir`.
        """
        folder = str(self.args.output_dir) if output_dir is None else os.fspath(output_dir)
        save_weights(self.model, folder, self.ranks)
