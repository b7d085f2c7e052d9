"""When a run logs, evaluates, saves and ends, by its arguments alone: Hugging Face's cadence, to the step."""

from __future__ import annotations

import math

from ..arguments import TrainingArguments
from ..events import TrainerControl, TrainerState

__all__ = ["at_epoch_end", "at_step_end", "resolve_steps"]


def resolve_steps(args: TrainingArguments, state: TrainerState, max_steps: int) -> None:
    """Writes how often things happen into the state, where shares of all steps have become numbers."""
    for name in ("logging_steps", "eval_steps", "save_steps"):
        steps = getattr(args, name)
        if steps is not None:
            setattr(state, name, math.ceil(max_steps * steps) if steps < 1 else int(steps))


def at_step_end(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
    """Sets the flags that the end of this step asks for."""
    step = state.global_step
    is_last = step >= state.max_steps
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


def at_epoch_end(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
    """Sets the flags that the end of this epoch asks for."""
    if args.logging_strategy == "epoch":
        control.should_log = True
    if args.eval_strategy == "epoch" and args.eval_delay <= (state.epoch or 0):
        control.should_evaluate = True
    if args.save_strategy == "epoch":
        control.should_save = True
