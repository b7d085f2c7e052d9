"""Run of our callbacks in Lightning and Keras, which have no state and control of our kind.

The protocol `Framework` hides the framework. The module decides when callbacks are called and their flags applied, as
our `Trainer` and Hugging Face's do. Flags are read at the end of a step, an evaluation, an epoch and a save. A log
precedes a save, a stop saves first, and an abort neither saves nor evaluates.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import UsageError
from ..agree import Ranks, ranks_of_this_process
from ..bus import CallbackHandler
from ..events import TrainerControl, TrainerState
from .foreign import named, plain

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RunArguments:
    """Settings that callbacks receive as `args`: the framework's settings under Hugging Face's names."""

    output_dir: str = "."
    logging_dir: str = "./logs"
    max_steps: int = -1
    num_train_epochs: float = 0
    logging_strategy: str = "steps"
    logging_steps: int = 500
    eval_strategy: str = "no"
    eval_steps: int | None = None
    save_strategy: str = "no"
    """"no" if only callbacks request checkpoints. A stop may still save, see `CallbackRun`."""
    save_steps: int = 500
    gradient_accumulation_steps: int = 1
    per_device_train_batch_size: int | None = None
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    resume_from_checkpoint: str | None = None
    disable_tqdm: bool = False


class Framework(Protocol):
    """Interface of a framework to `CallbackRun`. Every method is called on all ranks, at the same places."""

    def context(self, event: str) -> dict[str, Any]:
        """Return model, optimizer and so on for the handlers of an event."""

    def logs(self) -> dict[str, Any]:
        """Return the framework's numbers of the steps since the last log, except `loss`."""

    def save(self, folder: str, step: int) -> str | None:
        """Write a checkpoint and return its path; None: `CallbackRun.saved` has already been called."""

    def stop(self) -> None:
        """End training after this step."""

    def abort(self) -> None:
        """End training after this step, without further saves and evaluations by the framework."""

    def stop_epoch(self) -> None:
        """End the epoch after this step."""

    def evaluate(self) -> None:
        """Evaluate now. A framework that cannot logs one warning."""


class CallbackRun:
    """Callbacks of a run with their state and control.

    Args:
        callbacks: instances or classes of callbacks.
        output_dir: folder of checkpoints; None: the framework's.
        logging_dir: folder of loggers; None: `<output_dir>/logs`.
        logging_steps: optimizer steps between two logs, at least 1; None: the framework's.
        saves_at_stop: write a checkpoint before a stop.
        ranks: ranks of the run; None: those of torch's process group.

    Raises:
        UsageError: a callback or `logging_steps` is not legal.
    """

    def __init__(
        self,
        callbacks: Iterable[object],
        *,
        output_dir: str | os.PathLike[str] | None,
        logging_dir: str | os.PathLike[str] | None,
        logging_steps: int | None,
        saves_at_stop: bool,
        ranks: Ranks | None,
    ) -> None:
        if logging_steps is not None and logging_steps < 1:
            raise UsageError(
                f"logging_steps={logging_steps!r}: must be a whole number of steps >= 1, or None; set logging_steps=1 "
                "or more"
            )
        self.bus = CallbackHandler(callbacks)
        self.args, self.state, self.control = RunArguments(), TrainerState(), TrainerControl()
        self.framework: Framework
        self._folders = (output_dir, logging_dir)
        self.logging_steps = logging_steps
        self._saves_at_stop = saves_at_stop
        self._given_ranks = ranks
        self.before_log: Callable[[], None] | None = None
        """Hook before each log, which adds losses that have not been been passed to `add_loss` yet."""
        self._evaluation_began: float | None = None
        self._resumed: Mapping[str, Any] = {}
        self._has_begun_once = self._is_over = False
        self._reset()

    def _reset(self) -> None:
        self.control = TrainerControl()
        self._is_stopping = self._is_aborted = self._is_over = False
        self._saved_step = self._logged_step = self._first_step = self.state.global_step
        self._began = time.monotonic()
        # A checkpoint within a logging interval restores the sums of its first part.
        self._loss, self._weight, self._tokens = self._resumed.get("since_log", (0.0, 0.0, 0))
        self._all_loss, self._all_weight = self._resumed.get("of_run", (0.0, 0.0))
        self._resumed = {}

    # Begin and end ---------------------------------------------------------------------------------------------------

    def meet(self, framework: Framework, *, output_dir: str) -> None:
        """Set framework, ranks and folders. Call it before any event, on all ranks; repeated calls are allowed."""
        self.framework = framework
        if self.bus.ranks.world_size == 1:
            self.bus = CallbackHandler(list(self.bus), ranks=self._given_ranks or ranks_of_this_process())
        ranks = self.bus.ranks
        self.state.is_world_process_zero = ranks.rank == 0
        self.state.is_local_process_zero = ranks.local_rank == 0
        self.args.output_dir = os.fspath(self._folders[0] or output_dir)
        self.args.logging_dir = os.fspath(self._folders[1] or os.path.join(self.args.output_dir, "logs"))

    def init_end(self) -> None:
        """Fire `on_init_end`, once."""
        if not self._has_begun_once:
            self._has_begun_once = True
            self.fire("on_init_end")
            self.bus.agree(self.control)

    def begin(self, *, global_step: int) -> None:
        """Begin the run; `state` and `args` must be complete.

        Args:
            global_step: step at which the run begins.
        """
        self.state.global_step = global_step
        self._reset()
        self.fire("on_train_begin")
        self.settle()

    def end(self) -> None:
        """Log the summary, fire `on_train_end` and close the callbacks."""
        runtime = max(time.monotonic() - self._began, 1e-9)
        steps = self.state.global_step - self._first_step
        self._drain()
        logs: dict[str, Any] = {"train_runtime": round(runtime, 4), "train_steps_per_second": round(steps / runtime, 3)}
        if self.state.total_flos:
            logs["total_flos"] = self.state.total_flos
        if self._all_weight:
            logs["train_loss"] = self._all_loss / self._all_weight
        logs["epoch"] = self.state.epoch
        self._keep(logs)
        try:
            self.fire("on_log", logs=logs)
            self.fire("on_train_end")
            self.bus.agree(self.control)
        finally:
            self._is_over = True
            self.bus.close()

    # Events ----------------------------------------------------------------------------------------------------------

    def fire(self, event: str, **context: Any) -> None:
        """Fire an event with the framework's objects; `context` adds to them."""
        whole: dict[str, Any] = {
            "processing_class": None,
            "lr_scheduler": None,
            "train_dataloader": None,
            "eval_dataloader": None,
        }
        whole |= self.framework.context(event)
        whole |= {"args": self.args, "state": self.state}
        self.bus.fire(event, control=self.control, **{**whole, **context})

    def step_begin(self) -> None:
        self.control.should_save = self.control.should_evaluate = self.control.should_log = False
        self.fire("on_step_begin")

    def step_end(self, *, global_step: int, epoch: float) -> None:
        """Count a step, which may advance `global_step` by more than one, and apply the flags."""
        before, self.state.global_step = self.state.global_step, global_step
        self.state.epoch = epoch
        every = self.state.logging_steps
        if self.args.logging_strategy == "steps" and global_step // every > before // every:
            self.control.should_log = True
        self.fire("on_step_end")
        self.settle()

    def epoch_end(self, epoch: float) -> None:
        self.state.epoch = epoch
        if self.args.logging_strategy == "epoch":
            self.control.should_log = True
        self.fire("on_epoch_end")
        self.settle()

    @property
    def is_aborted(self) -> bool:
        return self._is_aborted

    def evaluation_begins(self) -> None:
        self._evaluation_began = time.monotonic()

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        self.control.should_evaluate = False
        reported = dict(metrics)
        if self._evaluation_began is not None:
            reported["eval_runtime"] = round(time.monotonic() - self._evaluation_began, 4)
        if self.state.epoch is not None:
            reported["epoch"] = self.state.epoch
        self._keep(reported)
        self.fire("on_evaluate", metrics=reported)
        self.settle()

    def evaluated_beside(self, metrics: Mapping[str, Any], *, step: int, epoch: float) -> None:
        """Report an asynchronous evaluation of an earlier step's weights, with a state of that step.

        Ignored after the end of the run.
        """
        if self._is_over:
            return
        then = copy.copy(self.state)
        then.global_step, then.epoch = step, epoch
        reported = {**metrics, "epoch": epoch}
        self.state.log_history.append({**{name: plain(value) for name, value in reported.items()}, "step": step})
        self.fire("on_evaluate", state=then, metrics=reported)
        self.settle()

    def saved(self, path: str) -> None:
        """Report a checkpoint, whoever requested it. Ignored after the end of the run."""
        if self._is_over:
            return
        self._saved_step = self.state.global_step
        self.control.should_save = False
        self.fire("on_save", checkpoint=path)
        self.bus.agree(self.control)
        self._obey()

    def add_loss(self, *, loss: Any = None, weight: float = 1.0, tokens: int = 0) -> None:
        """Add to the next log: a mean loss of `weight` parts, and tokens. Losses may be tensors; none is waited for."""
        self._tokens += tokens
        if loss is not None:
            self._loss, self._weight = self._loss + loss * weight, self._weight + weight

    # Requests of callbacks -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Do what callbacks of any rank have requested. Collective."""
        self.bus.agree(self.control)
        if self.control.should_log:
            self._write_log()
        self._obey()
        if self._is_stopping and self._saves_at_stop and self._saved_step != self.state.global_step:
            self.control.should_save = True
        if self._is_aborted:
            self.control.should_save = False
        if self.control.should_save:
            self.control.should_save = False
            path = self.framework.save(self.args.output_dir, self.state.global_step)
            if path is not None:
                self.saved(path)

    def _obey(self) -> None:
        control = self.control
        if control.should_abort_without_save and not self._is_aborted:
            self._is_aborted = True
            self.framework.abort()
        if self._is_aborted:
            control.should_save = control.should_evaluate = False
        elif control.should_training_stop and not self._is_stopping:
            self._is_stopping = True
            self.framework.stop()
        if control.should_epoch_stop:
            control.should_epoch_stop = False
            self.framework.stop_epoch()
        if control.should_evaluate:
            control.should_evaluate = False
            self.framework.evaluate()

    def _write_log(self) -> None:
        self.control.should_log = False
        if self.state.global_step == self._logged_step:
            return
        self._logged_step = self.state.global_step
        if self.before_log is not None:
            self.before_log()
        seen = self.state.num_input_tokens_seen
        loss = self._drain()
        logs: dict[str, Any] = {} if loss is None else {"loss": loss}
        logs |= self.framework.logs()
        if self.state.num_input_tokens_seen > seen:
            logs["tokens"] = self.state.num_input_tokens_seen - seen
        self.fire("on_log_step", logs=logs)
        logs["epoch"] = self.state.epoch
        self._keep(logs)
        self.fire("on_log", logs=logs)
        self.bus.agree(self.control)

    def _drain(self) -> float | None:
        """Return the mean loss since the last call, over all ranks, and count their tokens. Collective."""
        own = (float(self._loss), self._weight, self._tokens)
        self._loss, self._weight, self._tokens = 0.0, 0.0, 0
        parts = self.bus.ranks.exchange(own)
        loss, weight = sum(part[0] for part in parts), sum(part[1] for part in parts)
        self.state.num_input_tokens_seen += sum(part[2] for part in parts)
        self._all_loss, self._all_weight = self._all_loss + loss, self._all_weight + weight
        return loss / weight if weight else None

    def _keep(self, logs: Mapping[str, Any]) -> None:
        self.state.log_history.append(
            {**{name: plain(value) for name, value in logs.items()}, "step": self.state.global_step}
        )

    # State -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self.before_log is not None:
            self.before_log()
        state = self.state
        kept = {"num_input_tokens_seen": state.num_input_tokens_seen, "total_flos": state.total_flos}
        since_log = [float(self._loss), self._weight, self._tokens]
        return {
            "callbacks": self.bus.state_dict(),
            "state": {**kept, "log_history": list(state.log_history)},
            "losses": {"since_log": since_log, "of_run": [self._all_loss, self._all_weight]},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for name, value in state_dict["state"].items():
            setattr(self.state, name, value)
        self._resumed = state_dict["losses"]
        self.bus.load_state_dict(state_dict["callbacks"])


_VALIDATION = ("val_", "val/", "valid_", "validation_", "eval/")


def as_eval_metrics(metrics: Mapping[str, Any], *, prefix: str = "eval_") -> dict[str, Any]:
    """Rename metrics as callbacks expect them: `val_loss`, `val/loss` and `loss` become `eval_loss`."""
    return named(metrics, prefix, instead_of=_VALIDATION)
