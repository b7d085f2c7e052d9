"""State of a run: its progress, flags and running sums, and the events that report them."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from ...errors import UsageError
from ..agree import Ranks
from ..arguments import TrainingArguments
from ..bus import CallbackHandler
from ..callbacks.info import InfoCallback
from ..callbacks.metrics import DefaultMetrics
from ..callbacks.progress import ProgressCallback
from ..events import TrainerCallback, TrainerControl, TrainerState
from .evaluation import plain

_log = logging.getLogger(__name__)


class Record:
    """Running sums of this rank since the last log, and of the whole run. Losses are summed on their device.

    Its state holds every rank's sums. A resumed run therefore logs the same numbers as one without the interruption.

    Args:
        ranks: ranks of the run.
        device: device of the losses.
        filters: leave steps whose loss is not finite out of the mean, unless all are.
    """

    def __init__(self, ranks: Ranks, device: torch.device, *, filters: bool) -> None:
        self._ranks, self._filters = ranks, filters
        kind = torch.float32 if device.type == "mps" else torch.float64
        self._zero = torch.zeros(2, dtype=kind, device=device)
        self._sums = self._zero.clone()  # of finite losses; how many were not
        self._steps = 0
        self._tokens = 0
        self._flos = 0.0
        self._all_losses = 0.0
        self._all_steps = 0
        self._has_drained = False

    def add(self, loss: torch.Tensor, *, tokens: int, flos: float) -> None:
        """Add one step of this rank; `loss` is ()."""
        # Tensor arithmetic instead of Python's, because a branch on the loss would wait for the device in each step.
        loss = loss.detach().to(self._sums.dtype)
        if self._filters:
            finite = torch.isfinite(loss)
            self._sums += torch.stack([torch.where(finite, loss, 0.0), (~finite).to(loss.dtype)])
        else:
            self._sums[0] += loss
        self._steps += 1
        self._tokens += tokens
        self._flos += flos

    @property
    def steps(self) -> int:
        """Number of steps since the last log."""
        return self._steps

    def drain(self, extra: Any = None) -> tuple[float, int, float, list[Any]]:
        """Begin the next interval; return the last one's mean loss, tokens, operations and every rank's `extra`.

        Collective. The mean, the tokens and the operations are those of all ranks.
        """
        total, skipped = self._sums.tolist()
        parts = self._ranks.exchange((total, skipped, self._tokens, self._flos, extra))
        means = [_mean(part[0], self._steps - part[1]) for part in parts]
        loss = sum(means) / len(means)
        if math.isfinite(loss):  # an interval without a loss must not count as one with loss 0
            self._all_losses += loss * self._steps
            self._all_steps += self._steps
        self._has_drained = self._has_drained or self._steps > 0
        self._sums = self._zero.clone()
        self._steps, self._tokens, self._flos = 0, 0, 0.0
        return loss, sum(part[2] for part in parts), sum(part[3] for part in parts), [part[4] for part in parts]

    def mean_of_run(self) -> float:
        """Return the mean loss over all intervals with a finite one: 0 before the first step, NaN if none had one."""
        if self._all_steps:
            return self._all_losses / self._all_steps
        return math.nan if self._has_drained else 0.0

    def gather(self) -> dict[str, Any]:
        """Return the sums of all ranks. Collective."""
        own = (*self._sums.tolist(), self._tokens, self._flos)
        return {
            "interval": [list(sums) for sums in self._ranks.exchange(own)],
            "steps": self._steps,
            "run": [self._all_losses, self._all_steps],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of `gather`. With another number of ranks, the ranks share the sums."""
        interval = state["interval"]
        world = self._ranks.world_size
        if len(interval) == world:
            loss, skipped, tokens, flos = interval[self._ranks.rank]
        else:
            loss, skipped = (sum(sums[at] for sums in interval) / len(interval) for at in (0, 1))
            tokens, flos = ((sum(sums[at] for sums in interval) if self._ranks.rank == 0 else 0) for at in (2, 3))
        self._sums = torch.tensor([loss, skipped], dtype=self._zero.dtype, device=self._zero.device)
        self._steps, self._tokens, self._flos = state["steps"], tokens, flos
        self._all_losses, self._all_steps = state["run"]


def _mean(total: float, count: float) -> float:
    # Without any finite loss, NaN is shown: a diverged run must be visible.
    return total / count if count > 0 else math.nan


@dataclass(kw_only=True)
class Position:
    """Position of a run in its data. Checkpoints keep it."""

    epoch: int = 0
    rounds: int = 0
    """Micro-batches taken in this epoch."""
    is_stopped: bool = False
    """Whether a callback ended the epoch early."""
    owes_evaluation: bool = False
    """Whether the evaluation after this step is still to be made."""


class TrainerRun:
    """Run of a Trainer. Its state is a component of checkpoints.

    Args:
        args: settings of the run.
        ranks: ranks of the run.
        device: device of the losses.
        callbacks: receive the events.
        context: returns what every event passes in addition to the state. It is called once per step, because users may
            replace the trainer's objects.
    """

    def __init__(
        self,
        args: TrainingArguments,
        *,
        ranks: Ranks,
        device: torch.device,
        callbacks: CallbackHandler,
        context: Callable[[], dict[str, Any]],
    ) -> None:
        self._args, self._ranks, self._device = args, ranks, device
        self._callbacks, self._make_context = callbacks, context
        self._has_begun = False
        self.control = TrainerControl()
        self.restart()

    def restart(self) -> None:
        """Begin again at step 0."""
        self.state = TrainerState(
            is_world_process_zero=self._ranks.rank == 0,
            is_local_process_zero=self._ranks.local_rank == 0,
            train_batch_size=self._args.train_batch_size,
        )
        self.position = Position()
        self.record = Record(self._ranks, self._device, filters=self._args.logging_nan_inf_filter)
        self.last_loss: torch.Tensor | None = None
        self.is_scheduled = False
        """Whether the pending save is due by save_steps, and not requested by a callback."""
        self._last_step: tuple[torch.Tensor | None, float] = (None, 0.0)  # gradient norm, learning rate
        self._rounds_per_epoch = 1
        self._context: dict[str, Any] | None = None

    # Events ----------------------------------------------------------------------------------------------------------

    def fire(self, event: str, **more: Any) -> None:
        if not self._callbacks.listens(event):
            return
        if self._context is None:
            self._context = {"args": self._args, "state": self.state, **self._make_context()}
        self.control = self._callbacks.dispatch(event, self.control, self._context | more if more else self._context)

    def forget_context(self) -> None:
        """Build the context again for the next event."""
        self._context = None

    def agree(self) -> None:
        """Combine the flags of all ranks: a flag that one rank has set is set on all. Collective."""
        self.control = self._callbacks.agree(self.control)
        if self.control.should_abort_without_save:
            self.control.should_training_stop = True
            self.control.should_save = self.control.should_evaluate = False

    def begin(self) -> None:
        """Fire `on_init_end`, once. The states of a resumed run are already loaded."""
        if not self._has_begun:
            self._has_begun = True
            self.fire("on_init_end")
            self.agree()

    def log(self, logs: dict[str, Any]) -> None:
        """Append `logs` to `state.log_history` with the epoch, and fire `on_log`."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.control.should_log = False
        self.state.log_history.append({**plain(logs), "step": self.state.global_step})
        self.fire("on_log", logs=logs)

    def logs_of_step(self) -> dict[str, Any]:
        """Return the sums since the last log, and whatever callbacks add to them. Collective."""
        norm, rate = self._last_step
        memory = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
        mean, tokens, memories = self.drain(memory)
        logs: dict[str, Any] = {"loss": mean}
        if norm is not None:
            logs["grad_norm"] = norm.item()
        logs["learning_rate"] = rate
        if tokens:
            logs["tokens"], logs["total_flos"] = tokens, self.state.total_flos
        if memory is not None:
            logs["peak_mem_allocated"] = memories
        if self._args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        self.control.should_log = False
        self.fire("on_log_step", logs=logs)
        return logs

    def drain(self, memory: int | None = None) -> tuple[float, int, list[Any]]:
        """Begin the next interval; return the last one's mean loss, tokens, and every rank's memory. Collective.

        Args:
            memory: peak memory of this rank, in bytes; None: no GPU.
        """
        mean, tokens, flos, memories = self.record.drain(memory)
        self.state.num_input_tokens_seen += tokens
        self.state.total_flos += flos
        return mean, tokens, memories

    # Steps, with the cadence of Hugging Face's Trainer ---------------------------------------------------------------

    def set_length(self, rounds: int | None) -> None:
        """Set the number of steps and epochs of the run.

        Args:
            rounds: micro-batches of an epoch; None: not known.
        """
        args, state = self._args, self.state
        if rounds is None and args.max_steps <= 0:
            raise UsageError(
                f"{type(args).__name__}.max_steps={args.max_steps}: the training data has no length; set max_steps=1 "
                "or more"
            )
        if rounds is None:
            state.max_steps, state.num_train_epochs = args.max_steps, sys.maxsize
            self._rounds_per_epoch = args.max_steps * args.gradient_accumulation_steps
        else:
            steps = max(1, -(-rounds // args.gradient_accumulation_steps))
            state.max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps)
            state.num_train_epochs = (
                -(-args.max_steps // steps) if args.max_steps > 0 else math.ceil(args.num_train_epochs)
            )
            self._rounds_per_epoch = max(1, rounds)
        for name in ("logging_steps", "eval_steps", "save_steps"):
            every = getattr(args, name)
            if every is not None:  # a share of all steps becomes a number of steps
                setattr(state, name, math.ceil(state.max_steps * every) if every < 1 else int(every))

    @property
    def has_all_steps(self) -> bool:
        return self.state.global_step >= self.state.max_steps

    def begin_step(self) -> None:
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False
        self.forget_context()
        self.fire("on_step_begin")

    def end_step(self, *, rounds: int, norm: torch.Tensor, rate: float, loss: torch.Tensor) -> None:
        """Count the step, set the flags that are due, and fire `on_step_end`.

        Args:
            rounds: micro-batches of the step.
            norm: norm of its gradients: ().
            rate: its learning rate.
            loss: its loss on this rank: ().
        """
        args, state, control = self._args, self.state, self.control
        state.global_step += 1
        self.position.rounds += rounds
        state.epoch = self.position.epoch + self.position.rounds / self._rounds_per_epoch
        step, is_last = state.global_step, self.has_all_steps
        if (step == 1 and args.logging_first_step) or (
            args.logging_strategy == "steps" and step % state.logging_steps == 0
        ):
            control.should_log = True
        evaluates = args.eval_strategy == "steps" and args.eval_delay <= step
        if evaluates and (is_last or step % state.eval_steps == 0):
            control.should_evaluate = True
        if args.save_strategy == "steps" and (is_last or step % state.save_steps == 0):
            control.should_save = True
        if is_last:
            control.should_training_stop = True
        self.is_scheduled = control.should_save
        self.fire("on_step_end")
        self._last_step, self.last_loss = (norm, rate), loss

    def end_epoch(self) -> None:
        """Set the flags that are due, fire `on_epoch_end`, and go to the next epoch."""
        args, control, epoch = self._args, self.control, self.position.epoch
        if self.has_all_steps:
            control.should_training_stop = True
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and args.eval_delay <= (self.state.epoch or 0):
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True
        self.is_scheduled = control.should_save
        self.fire("on_epoch_end")
        self.position = Position(epoch=epoch + 1)  # a checkpoint from now on resumes with the next epoch

    # As a component of checkpoints -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run. Collective, because it gathers every rank's sums."""
        position = asdict(self.position)
        position["is_stopped"] = self.control.should_epoch_stop and self.position.rounds > 0
        return {"state": asdict(self.state), "position": position, "record": self.record.gather()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        known = {field.name for field in fields(TrainerState)} - {"is_world_process_zero", "is_local_process_zero"}
        for name, value in state_dict["state"].items():
            if name in known:
                setattr(self.state, name, value)
        best = self.state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):
            _log.warning("the best checkpoint, %s, no longer exists; the run forgets it", best)
            self.state.best_model_checkpoint = None
        self.position = Position(**state_dict["position"])
        self.record.restore(state_dict["record"])


def with_defaults(chosen: Iterable[object] | None, args: TrainingArguments) -> list[object]:
    """Return the user's callbacks among the defaults; a user's callback replaces a default of its class."""
    if not isinstance(chosen, Iterable | None):
        raise UsageError(f"callbacks={chosen!r}: must be a list of callbacks; write callbacks=[...]")
    callbacks = list(chosen or ())

    def absent(kind: type[TrainerCallback], **options: Any) -> list[object]:
        is_chosen = any(isinstance(callback, kind) or callback is kind for callback in callbacks)
        return [] if is_chosen else [kind(**options)]

    progress = {"use_tqdm": False} if args.disable_tqdm else {}
    return [
        *absent(DefaultMetrics),
        *callbacks,
        *absent(InfoCallback),
        *absent(ProgressCallback, **progress),
    ]
