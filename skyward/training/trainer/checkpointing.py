"""What a Trainer keeps: the components of a checkpoint, when they are written, and how they are loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch

from ..checkpoint import RNGState, RunTerminated, SharingPattern, StateComponent
from ..checkpoint.finite import is_finite
from ..checkpoint.termination import Termination
from ..events import TrainerState
from .assembly import Assembly, Position
from .parts import CheckpointParts
from .saves import Saved, checkpoint_to_resume
from .states import ModelState, OptimizerState, RunState, write_weights
from .world import is_sharded

__all__ = ["Checkpointing"]

_log = logging.getLogger(__name__)


class Checkpointing(Assembly):
    """Saves and loads of a run."""

    _chosen: tuple[str, CheckpointParts] | None = None
    """What the next `train` goes on from."""
    _last_loss: torch.Tensor | None = None
    _termination: Termination

    def get_state_components(self, *, for_saving: bool = False) -> list[StateComponent]:
        """What a checkpoint of this run is made of. Between `train`'s begin and end.

        for_saving: with `save_only_model`, of the model only.
        """
        assert self._stream is not None
        assert self.lr_scheduler is not None
        assert self.optimizer is not None
        shared = self._shared_pattern()
        model = self._component("model", ModelState(self.model), shared)
        if for_saving and self.args.save_only_model:
            return [model]
        optimizer = OptimizerState(self.model, self.optimizer)
        run = RunState(self._state_of_run, self._load_state_of_run, self._record.gather)
        parts: list[tuple[str, Any, SharingPattern]] = [
            ("optimizer", optimizer, shared),
            ("scheduler", self.lr_scheduler, shared),
            ("scaler", self._precision, shared),
            ("dataset", self._stream, self._stream.sharing_pattern),
            ("callbacks", self.callback_handler, SharingPattern.GLOBAL),
            ("trainer", run, SharingPattern.GLOBAL),
            ("rng", RNGState(), SharingPattern.PER_RANK),
        ]
        return [model, *(self._component(key, part, how) for key, part, how in parts)]

    def _component(self, key: str, stateful: Any, pattern: SharingPattern) -> StateComponent:
        """Replicas of model and optimizer are compared at every save: ranks that have drifted apart are found then."""
        is_compared = pattern is SharingPattern.REPLICATED and key in ("model", "optimizer")
        return StateComponent(key, stateful, pattern, validate_replication=is_compared)

    def get_process_groups(self) -> dict[str, Any]:
        """Groups that components name: none."""
        return {}

    def _shared_pattern(self) -> SharingPattern:
        """Of model, optimizer and schedule. The state of a sharded model is gathered: then there is one, too."""
        is_replicated = self.ranks.world_size > 1 and not is_sharded(self.model)
        return SharingPattern.REPLICATED if is_replicated else SharingPattern.GLOBAL

    def _state_of_run(self) -> dict[str, Any]:
        position = asdict(self._position)
        position["is_stopped"] = self.control.should_epoch_stop and self._position.rounds > 0
        return {"state": asdict(self.state), "position": position}

    def _load_state_of_run(self, state: dict[str, Any], record: dict[str, Any]) -> None:
        known = {each.name for each in fields(TrainerState)} - {"is_world_process_zero", "is_local_process_zero"}
        for name, value in state["state"].items():
            if name in known:
                setattr(self.state, name, value)
        best = self.state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):
            _log.warning("the best checkpoint, %s, is not there any more; it is forgotten", best)
            self.state.best_model_checkpoint = None
        self._position = Position(**state["position"])
        self._record.restore(record)

    def _restore_rng(self) -> None:
        if self._pending_rng is not None:
            (path, parts), self._pending_rng = self._pending_rng, None
            self._load(path, only={"rng"}, parts=parts)

    def load_checkpoint(
        self,
        path: bool | str | os.PathLike[str],
        strict: bool = True,
        *,
        only: Collection[str] | None = None,
        skip: Collection[str] = (),
    ) -> None:
        """Load the model of a checkpoint now, and the rest when `train` begins, which then goes on from there.

        Collective. `train(resume_from_checkpoint=...)` takes another checkpoint instead.

        Args:
            path: a folder, True (the newest) or "auto" (the newest, if there is one), as in TrainingArguments.
            strict: False: what the checkpoint lacks is warned of, and stays as it is.
            only: keys of the components that count, such as "model", "optimizer", "dataset"; None: all of them. With
                `only=["model"]` a new run begins at step 0 with these weights.
            skip: keys of those that do not.

        Raises:
            UsageError: there is no checkpoint, or no such component; the latter when `train` begins.
            CheckpointNotFound, CheckpointCorrupt, CheckpointMismatch: on all ranks, before anything is changed.
        """
        parts = CheckpointParts(strict=strict, only=only, skip=skip)
        found = checkpoint_to_resume(path, self.args, self.checkpoints, self.ranks)
        if found is None:
            return
        self._chosen = found, parts
        if "model" not in skip and (only is None or "model" in only):
            model = self._component("model", ModelState(self.model), self._shared_pattern())
            groups = self.get_process_groups()
            self.checkpoints.load(found, [model], strict=strict, process_groups=groups)

    def _checkpoint_to_resume(self, asked: bool | str | os.PathLike[str] | None) -> tuple[str | None, CheckpointParts]:
        """What `train` goes on from: what it is asked for, else what was loaded before, else what the arguments say."""
        chosen, self._chosen = self._chosen, None
        if asked is None and chosen is not None:
            return chosen
        return checkpoint_to_resume(asked, self.args, self.checkpoints, self.ranks), CheckpointParts()

    def _load(
        self,
        path: str,
        *,
        only: Collection[str] | None = None,
        skip: Collection[str] = (),
        parts: CheckpointParts | None = None,
    ) -> None:
        parts, components = parts or CheckpointParts(), self.get_state_components()
        keys = parts.of([each.key for each in components]) - set(skip)
        keys = keys if only is None else keys & set(only)
        if keys:
            groups = self.get_process_groups()
            self.checkpoints.load(path, components, strict=parts.strict, only=keys, process_groups=groups)

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Writes the weights: as the model does it (`save_pretrained`), else as model.safetensors. Collective."""
        folder = os.fspath(output_dir if output_dir is not None else str(self.args.output_dir))
        weights = ModelState(self.model).state_dict()
        if self.ranks.rank == 0:
            save = getattr(self.model, "save_pretrained", None)
            if save is not None:
                os.makedirs(folder, exist_ok=True)
                save(folder, state_dict=weights)
            else:
                write_weights(folder, weights)
        self.ranks.exchange(None)

    # When they are written -------------------------------------------------------------------------------------------

    def _save(self, *, is_needed: bool) -> None:
        step, state = self.state.global_step, self.state
        self.control.should_save = False
        if self._saves.is_left_out(is_needed=is_needed):
            _log.info("step %d is not saved: the checkpoint before it is still being written", step)
            return
        self._tell_of(self._saves.wait())
        if state.best_global_step == step:
            state.best_model_checkpoint = os.path.join(str(self.args.output_dir), f"checkpoint-{step}")
        components = self.get_state_components(for_saving=True)
        best = state.best_model_checkpoint
        about = {
            "epoch": state.epoch,
            "training_args_hash": self.args.digest(),
            "metrics": metrics_at(step, state.log_history),
            "is_finite": is_finite(self.model, self._last_loss),
        }
        self._tell_of(self._saves.begin(step, components, groups=self.get_process_groups(), best=best, about=about))

    def _tell_of(self, saved: Saved | None) -> None:
        """A checkpoint is durable, if there is one: only now may older ones go."""
        if saved is None:
            return
        if self.args.save_total_limit is not None:
            best = {saved.best, self.state.best_model_checkpoint} - {None}
            self.checkpoints.prune(keep=self.args.save_total_limit, protect=[str(each) for each in best])
        self._fire("on_save", checkpoint=saved.path, saved_step=saved.step)

    def _is_terminated(self) -> bool:
        """Whether any rank's machine is about to go. Collective with `enable_jit_checkpoint`: one small all-reduce."""
        return self.args.enable_jit_checkpoint and bool(self.ranks.flags(int(self._termination.is_noticed)))

    def _save_and_go(self) -> None:
        """The machine is about to go. An evaluation would take too long; the run that goes on makes it up.

        Raises: RunTerminated.
        """
        step = self.state.global_step
        self._position.owes_evaluation = self.control.should_evaluate
        _log.warning("this run is being ended: saving step %d first", step)
        if self._saves.begun_at != step:
            self._tell_of(self._saves.wait(self._termination.left_s))
            self._save(is_needed=True)
        self._tell_of(self._saves.wait(self._termination.left_s))
        self._agree()
        raise RunTerminated(self.checkpoints.path_of(step))


def metrics_at(step: int, history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The losses and evaluations that were logged at `step`. How fast they were says nothing of a checkpoint."""
    return {
        name: value
        for entry in history
        if entry.get("step") == step
        for name, value in entry.items()
        if (name == "loss" or name.startswith("eval_"))
        and isinstance(value, int | float)
        and not name.endswith(("_runtime", "_per_second"))
    }
