"""The checkpoints and weights of a Trainer: when each is written, when it is durable, what a run goes on from."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from ...errors import UsageError
from ..agree import Ranks
from ..arguments import TrainingArguments
from ..checkpoint import Checkpoints, FileCheckpoints, ModelState, RunTerminated, StateComponent
from ..checkpoint.finite import is_finite
from ..checkpoint.termination import Termination
from .run import TrainerRun
from .world import is_sharded

__all__ = ["CheckpointParts", "Savable", "Saver", "save_weights", "write_weights"]

_log = logging.getLogger(__name__)


class Savable(Protocol):
    """What a saver knows of its trainer."""

    model: nn.Module

    def get_state_components(self, *, for_saving: bool = False) -> list[StateComponent]: ...

    def get_process_groups(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class CheckpointParts:
    """Which parts of a checkpoint a run goes on with.

    strict: a part that the checkpoint lacks is an error, else a warning. only, skip: keys; None: all of them.
    """

    strict: bool = True
    only: Collection[str] | None = None
    skip: Collection[str] = ()

    def __post_init__(self) -> None:
        for name, keys in (("only", self.only), ("skip", self.skip)):
            if isinstance(keys, str):
                raise UsageError(f"load_checkpoint: {name}={keys!r}: must be several keys; write {name}=[{keys!r}]")

    def of(self, known: Collection[str]) -> set[str]:
        """The keys among `known` that are to be loaded. Raises: UsageError for keys that are not known."""
        for name, keys in (("only", self.only or ()), ("skip", self.skip)):
            unknown = sorted(set(keys) - set(known))
            if unknown:
                raise UsageError(
                    f"load_checkpoint: {name}={sorted(keys)}: this run has no component {unknown[0]!r}; they are "
                    f"{', '.join(sorted(known))}"
                )
        return set(known if self.only is None else self.only) - set(self.skip)


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """A save. best: the path of the run's best checkpoint, as it was at that step."""

    step: int
    best: str | None


class Saver:
    """Saves and loads the states of a trainer, one save at a time. All ranks call it at the same places."""

    def __init__(
        self,
        args: TrainingArguments,
        trainer: Savable,
        *,
        run: TrainerRun,
        ranks: Ranks,
        checkpoints: Checkpoints | None,
    ) -> None:
        self._args, self._trainer, self._run, self._ranks = args, trainer, run, ranks
        self.checkpoints = checkpoints or FileCheckpoints(
            str(args.output_dir), ranks=ranks, on_each_node=args.save_on_each_node
        )
        self._termination = Termination(grace_s=args.jit_checkpoint_grace_s, option="enable_jit_checkpoint")
        self._pending: _Begun | None = None
        self.begun_at = -1
        """The step of the run's newest save, durable or not."""
        self._chosen: tuple[str, CheckpointParts] | None = None  # what the next run goes on from
        self._pending_rng: tuple[str, CheckpointParts] | None = None

    # What a run goes on from -----------------------------------------------------------------------------------------

    def choose(self, path: bool | str | os.PathLike[str], parts: CheckpointParts) -> str | None:
        """Have the next run go on from a checkpoint. Return its path; None: there is none. Collective."""
        found = self._path_to_resume(path)
        if found is not None:
            self._chosen = found, parts
        return found

    def begin(self, asked: bool | str | os.PathLike[str] | None) -> tuple[str, CheckpointParts] | None:
        """Begin a run. Return what it goes on from; None: nothing. Collective.

        It is what is asked for, else what was chosen before, else what the arguments say.
        """
        self.begun_at, self._pending_rng = -1, None
        chosen, self._chosen = self._chosen, None
        if asked is None and chosen is not None:
            return chosen
        path = self._path_to_resume(asked)
        return None if path is None else (path, CheckpointParts())

    def resume(self, path: str, parts: CheckpointParts) -> None:
        """Load all but the random numbers: what draws of them is made first. Collective."""
        self.load(path, skip={"rng"}, parts=parts)
        self._pending_rng = path, parts

    def resume_random_numbers(self) -> None:
        """Load them, if a checkpoint was resumed and they are not loaded yet. Collective then."""
        if self._pending_rng is not None:
            (path, parts), self._pending_rng = self._pending_rng, None
            self.load(path, only={"rng"}, parts=parts)

    def load(
        self,
        path: str,
        *,
        only: Collection[str] | None = None,
        skip: Collection[str] = (),
        parts: CheckpointParts | None = None,
    ) -> None:
        """Load those among the parts that are in `only` and not in `skip`. Collective."""
        parts, components = parts or CheckpointParts(), self._trainer.get_state_components()
        keys = parts.of([component.key for component in components]) - set(skip)
        keys = keys if only is None else keys & set(only)
        if keys:
            groups = self._trainer.get_process_groups()
            self.checkpoints.load(path, components, strict=parts.strict, only=keys, process_groups=groups)

    def _path_to_resume(self, asked: bool | str | os.PathLike[str] | None) -> str | None:
        """The folder that a run goes on from; None: it begins. Clears what interrupted saves have left. Collective."""
        path: str | None = None
        asked = self._args.resume_from_checkpoint if asked is None else asked
        if asked is True or asked == "auto":
            path = self._ranks.share(self.checkpoints.latest())
            if path is None and asked is True:
                raise UsageError(
                    f"resume_from_checkpoint=True: no checkpoint in {self._args.output_dir} to go on from; 'auto' "
                    "begins where there is none"
                )
        elif asked is not None and asked is not False:
            path = os.fspath(asked)
        if isinstance(self.checkpoints, FileCheckpoints):
            self.checkpoints.sweep()
        return path

    # Saves -----------------------------------------------------------------------------------------------------------

    def save(self, *, is_needed: bool) -> None:
        """Save this step, unless the writer is busy and the save is not needed. Collective.

        Raises: what the save raises, on all ranks; with `async_save`, `tell` does.
        """
        run, args, step = self._run, self._args, self._run.state.global_step
        run.control.should_save = False
        if self._pending is not None and not is_needed and args.save_on_busy == "skip":
            _log.info("step %d is not saved: the checkpoint before it is still being written", step)
            return
        self.tell(waits=True)
        if run.state.best_global_step == step:
            run.state.best_model_checkpoint = os.path.join(str(args.output_dir), f"checkpoint-{step}")
        begun = _Begun(step=step, best=run.state.best_model_checkpoint)
        components = self._trainer.get_state_components(for_saving=True)
        about = {
            "epoch": run.state.epoch,
            "training_args_hash": args.digest(),
            "metrics": _metrics_at(step, run.state.log_history),
            "is_finite": is_finite(self._trainer.model, run.last_loss),
        }
        groups = self._trainer.get_process_groups()
        if args.async_save:
            self.checkpoints.save_async(step, components, process_groups=groups, metadata=about)
            self.begun_at, self._pending = step, begun
        else:
            path = self.checkpoints.save(step, components, process_groups=groups, metadata=about)
            self.begun_at = step
            self._tell_of(begun, path)

    def tell(self, *, waits: bool = False, timeout_s: float | None = None) -> None:
        """Tell of the save behind training once, when it is durable on all ranks: only then may older ones go.

        Cheap, for every step, unless it waits. Raises: what the save raised, on all ranks at the same step;
        CheckpointSaveFailed when the time is up.
        """
        begun = self._pending
        if begun is None:
            return
        try:
            path = self.checkpoints.wait(timeout_s) if waits else self.checkpoints.poll()
        except Exception:
            self._pending = None
            raise
        if path is not None:
            self._pending = None
            self._tell_of(begun, path)

    def _tell_of(self, begun: _Begun, path: str) -> None:
        limit = self._args.save_total_limit
        if limit is not None:
            best = {begun.best, self._run.state.best_model_checkpoint} - {None}
            self.checkpoints.prune(keep=limit, protect=[str(path) for path in best])
        self._run.fire("on_save", checkpoint=path, saved_step=begun.step)

    # The end ---------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Listen for the end of this machine, with `enable_jit_checkpoint`, until `close`."""
        if self._args.enable_jit_checkpoint:
            self._termination.open(hears_provider=True)

    def close(self) -> None:
        """Where a run raises, wait for the save that is being written, so that it is not lost; log its own error."""
        self._termination.close()
        if self._pending is None:
            return
        self._pending = None
        try:
            self.checkpoints.wait()
        except Exception as error:
            _log.warning("the checkpoint of step %d was not written", self.begun_at, exc_info=error)

    def is_ending(self) -> bool:
        """Whether any rank's machine is about to go. Collective with `enable_jit_checkpoint`: one small all-reduce."""
        return self._args.enable_jit_checkpoint and bool(self._ranks.flags(int(self._termination.is_noticed)))

    def save_and_end(self) -> NoReturn:
        """Save before the machine goes. An evaluation would take too long; the run that goes on makes it up.

        Raises: RunTerminated.
        """
        run, step = self._run, self._run.state.global_step
        run.position.owes_evaluation = run.control.should_evaluate
        self._termination.save_in_time(
            step,
            is_saved=self.begun_at == step,
            wait=lambda timeout_s: self.tell(waits=True, timeout_s=timeout_s),
            save=lambda: self.save(is_needed=True),
        )
        run.agree()
        raise RunTerminated(self.checkpoints.path_of(step))


def save_weights(model: nn.Module, folder: str, ranks: Ranks) -> None:
    """Write the weights: as the model does it (`save_pretrained`), else as model.safetensors. Collective."""
    weights = ModelState(model, whole=True).state_dict() if is_sharded(model) else model.state_dict()
    if ranks.rank == 0:
        save = getattr(model, "save_pretrained", None)
        if save is not None:
            os.makedirs(folder, exist_ok=True)
            save(folder, state_dict=weights)
        else:
            write_weights(folder, weights)
    ranks.exchange(None)


def write_weights(folder: str, weights: Mapping[str, torch.Tensor]) -> None:
    """As `folder/model.safetensors`. Tied weights are written once for each of their names: it has no aliases."""
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    own = {name: value.detach().cpu().clone().contiguous() for name, value in weights.items()}
    save_file(own, os.path.join(folder, "model.safetensors"))


def _metrics_at(step: int, history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
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
