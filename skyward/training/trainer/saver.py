"""Saving and resuming of a Trainer: when a checkpoint is written, when it is durable, and which one a run resumes."""

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

_log = logging.getLogger(__name__)


class Savable(Protocol):
    """Part of a trainer that its saver uses."""

    model: nn.Module

    def get_state_components(self, *, for_saving: bool = False) -> list[StateComponent]: ...

    def get_process_groups(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class CheckpointParts:
    """Selection of a checkpoint's components.

    Args:
        strict: raise if the checkpoint lacks a component; False: log a warning.
        only: keys to load; None: all.
        skip: keys not to load.
    """

    strict: bool = True
    only: Collection[str] | None = None
    skip: Collection[str] = ()

    def __post_init__(self) -> None:
        for name, keys in (("only", self.only), ("skip", self.skip)):
            if isinstance(keys, str):
                raise UsageError(f"{name}={keys!r}: must be a list of keys; write {name}=[{keys!r}]")

    def of(self, known: Collection[str]) -> set[str]:
        """Return the keys among `known` to load.

        Raises:
            UsageError: `only` or `skip` has a key that is not among them.
        """
        for name, keys in (("only", self.only or ()), ("skip", self.skip)):
            unknown = sorted(set(keys) - set(known))
            if unknown:
                raise UsageError(
                    f"{name}={sorted(keys)}: this run has no component {unknown[0]!r}; use some of "
                    f"{', '.join(sorted(known))}"
                )
        return set(known if self.only is None else self.only) - set(self.skip)


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """Save that has begun."""

    step: int
    best: str | None
    """Path of the run's best checkpoint at that step."""


class Saver:
    """Saver of a trainer's states, one save at a time. All ranks call it at the same places."""

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
        """Step of the run's newest save, durable or not."""
        self._chosen: tuple[str, CheckpointParts] | None = None  # the next run resumes it
        self._pending_rng: tuple[str, CheckpointParts] | None = None

    # Resuming --------------------------------------------------------------------------------------------------------

    def choose(self, path: bool | str | os.PathLike[str], parts: CheckpointParts) -> str | None:
        """Choose the checkpoint that the next run resumes. Return its path; None: there is none. Collective."""
        folder = self._path_to_resume(path)
        if folder is not None:
            self._chosen = folder, parts
        return folder

    def begin(self, path: bool | str | os.PathLike[str] | None) -> tuple[str, CheckpointParts] | None:
        """Begin a run. Return the checkpoint that it resumes; None: it starts at step 0. Collective.

        `path` takes precedence over an earlier `choose`, and that over the arguments.
        """
        self.begun_at, self._pending_rng = -1, None
        chosen, self._chosen = self._chosen, None
        if path is None and chosen is not None:
            return chosen
        folder = self._path_to_resume(path)
        return None if folder is None else (folder, CheckpointParts())

    def resume(self, path: str, parts: CheckpointParts) -> None:
        """Load everything except the random numbers. Collective."""
        # Data loaders and callbacks draw random numbers when the run starts again, which the saved run had drawn before
        # its save. The saved random numbers are loaded behind those draws (TrainingLoop._run_epoch).
        self.load(path, skip={"rng"}, parts=parts)
        self._pending_rng = path, parts

    def resume_random_numbers(self) -> None:
        """Load the random numbers of a resumed checkpoint, once. Collective if there is one."""
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
        """Load the selected components, restricted to `only` and without `skip`. Collective."""
        parts, components = parts or CheckpointParts(), self._trainer.get_state_components()
        keys = parts.of([component.key for component in components]) - set(skip)
        keys = keys if only is None else keys & set(only)
        if keys:
            groups = self._trainer.get_process_groups()
            self.checkpoints.load(path, components, strict=parts.strict, only=keys, process_groups=groups)

    def _path_to_resume(self, path: bool | str | os.PathLike[str] | None) -> str | None:
        """Return the folder to resume, or None, and delete the remains of interrupted saves. Collective."""
        folder: str | None = None
        path = self._args.resume_from_checkpoint if path is None else path
        if path is True or path == "auto":
            folder = self._ranks.share(self.checkpoints.latest())
            if folder is None and path is True:
                raise UsageError(
                    f"resume_from_checkpoint=True: no checkpoint in {self._args.output_dir}; set "
                    "resume_from_checkpoint='auto' to start a new run where there is none"
                )
        elif path is not None and path is not False:
            folder = os.fspath(path)
        if isinstance(self.checkpoints, FileCheckpoints):
            self.checkpoints.sweep()
        return folder

    # Saves -----------------------------------------------------------------------------------------------------------

    def save(self, *, is_needed: bool) -> None:
        """Save this step, unless the writer is busy and the save may be skipped. Collective.

        Args:
            is_needed: save even if the writer is busy and `save_on_busy` is "skip".

        Raises:
            CheckpointError: the save failed; on all ranks. With `async_save`, `report_durable` raises it.
        """
        run, args, step = self._run, self._args, self._run.state.global_step
        run.control.should_save = False
        if self._pending is not None and not is_needed and args.save_on_busy == "skip":
            _log.info("save of step %d skipped: the checkpoint before it is still being written", step)
            return
        self.report_durable(waits=True)
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
            self._report(begun, path)

    def report_durable(self, *, waits: bool = False, timeout_s: float | None = None) -> None:
        """Report the background save once it is durable on all ranks: delete older checkpoints and fire `on_save`.

        Cheap enough for every step, unless it waits.

        Args:
            waits: wait until the save is durable.
            timeout_s: seconds to wait; None: no limit.

        Raises:
            CheckpointError: the save failed; on all ranks, at the same step.
            CheckpointSaveFailed: the save was not durable after `timeout_s`.
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
            self._report(begun, path)

    def _report(self, begun: _Begun, path: str) -> None:
        limit = self._args.save_total_limit
        if limit is not None:
            best = {begun.best, self._run.state.best_model_checkpoint} - {None}
            self.checkpoints.prune(keep=limit, protect=[str(path) for path in best])
        self._run.fire("on_save", checkpoint=path, saved_step=begun.step)

    # The end ---------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Listen for SIGTERM and the provider's notice until `close`, with `enable_jit_checkpoint`."""
        if self._args.enable_jit_checkpoint:
            self._termination.open(hears_provider=True)

    def close(self) -> None:
        """Stop listening, and finish a save that a run left behind when it raised. Its error is logged."""
        self._termination.close()
        if self._pending is None:
            return
        self._pending = None
        try:
            self.checkpoints.wait()
        except Exception as error:
            _log.warning("the save of step %d failed", self.begun_at, exc_info=error)

    def is_ending(self) -> bool:
        """Return whether any rank's machine is about to go. One small all-reduce with `enable_jit_checkpoint`."""
        return self._args.enable_jit_checkpoint and bool(self._ranks.flags(int(self._termination.is_noticed)))

    def save_and_end(self) -> NoReturn:
        """Save before the machine goes, and end the run.

        Raises:
            RunTerminated: always.
        """
        run, step = self._run, self._run.state.global_step
        # An evaluation would take longer than the machine lives, so the resumed run makes it.
        run.position.owes_evaluation = run.control.should_evaluate
        self._termination.save_in_time(
            step,
            is_saved=self.begun_at == step,
            wait=lambda timeout_s: self.report_durable(waits=True, timeout_s=timeout_s),
            save=lambda: self.save(is_needed=True),
        )
        run.agree()
        raise RunTerminated(self.checkpoints.path_of(step))


def save_weights(model: nn.Module, folder: str, ranks: Ranks) -> None:
    """Write the weights by the model's `save_pretrained`, else as model.safetensors. Collective."""
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
    """Write `folder/model.safetensors`. Tied weights are written under each name, because the format has no aliases."""
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    own = {name: value.detach().cpu().clone().contiguous() for name, value in weights.items()}
    save_file(own, os.path.join(folder, "model.safetensors"))


def _metrics_at(step: int, history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the losses and evaluations that were logged at `step`, without their runtimes."""
    return {
        name: value
        for entry in history
        if entry.get("step") == step
        for name, value in entry.items()
        if (name == "loss" or name.startswith("eval_"))
        and isinstance(value, int | float)
        and not name.endswith(("_runtime", "_per_second"))
    }
