"""Gradient norms of each parameter, logged at evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..agree import Alone, Ranks
from ..events import TrainerCallback, TrainerControl
from ..parts import part_of
from .jsonlog import JsonLogWriter
from .norms import PendingNorms, can_be_measured, joined, leave_out, measure, parameters_to_measure


class GradNormLogger(TrainerCallback):
    """Write the L2 norm of each parameter's gradient to `gradient_norms.json` at evaluations.

    The file is in `args.logging_dir`; without one the callback does nothing. Each record has `grad_norms` by parameter
    name, from the step before the evaluation, after clipping. A parameter without a gradient is left out. With Hugging
    Face's Trainer, fp16 and no clipping, the gradients are still scaled at that point.

    Norms start in the step before an evaluation, as a few kernels for all parameters. The evaluation waits for them
    once; other steps cost nothing. If that step cannot be predicted (evaluation by epoch, loader without a length),
    every step starts norms and none waits. The same holds after a first unpredicted evaluation, which gets no record.

    Rank 0 measures alone. If gradients are sharded (DTensors), or the model is a pipeline, every rank measures its
    part and rank 0 writes the whole model's norms.

    The callback warns once and turns itself off if there are no gradients to read: the optimizer runs inside the
    backward pass, or parameters are on the meta device.

    Example:
        >>> GradNormLogger().on_error
        'disable'
    """

    on_error = "disable"
    collective_events = frozenset({"on_train_begin", "on_evaluate"})

    def __init__(self) -> None:
        self._writer = JsonLogWriter("gradient_norms.json")
        self._is_off = True
        self._pending: PendingNorms | None = None
        self._pending_step = -1
        self._has_stepped = False
        self._foresees = True

    def on_train_begin(self, args: Any, state: Any, model: Any = None, ranks: Ranks | None = None, **_: Any) -> None:
        self._pending, self._has_stepped = None, False
        self._is_off = getattr(args, "logging_dir", None) is None
        if self._is_off:
            return
        world = ranks or Alone()
        self._is_off = not can_be_measured(model, world, who="GradNormLogger", why_else=_why_no_gradients)
        if not self._is_off and world.rank == 0:
            self._writer.open(args.logging_dir, global_step=state.global_step)

    def on_pre_optimizer_step(
        self,
        args: Any,
        state: Any,
        control: TrainerControl,
        model: Any = None,
        train_dataloader: Any = None,
        trainer: Any = None,
        ranks: Ranks | None = None,
        **_: Any,
    ) -> None:
        self._has_stepped = True
        if self._is_off:
            return
        if self._foresees and evaluation_follows(args, state, control, train_dataloader) is False:
            return
        self._pending, self._pending_step = None, state.global_step + 1
        world, is_part = ranks or Alone(), part_of(trainer) is not None
        parameters = parameters_to_measure(model, trainer, world)
        gradients = {name: item.grad for name, item in parameters.items() if item.grad is not None}
        if parameters and not gradients and not is_part:  # a pipeline stage may be frozen, the whole model not
            self._is_off = True
            leave_out("GradNormLogger", "no parameter has a gradient when the optimizer's step begins", world)
        elif parameters or is_part:
            self._pending = measure(gradients)

    def on_evaluate(self, state: Any, trainer: Any = None, ranks: Ranks | None = None, **_: Any) -> None:
        world = ranks or Alone()
        pending, self._pending = self._pending, None
        is_current = self._pending_step == state.global_step
        # Some evaluations come off schedule (Lightning's val_check_interval, one that a callback requested). After
        # the first of them the prediction is not trusted again.
        self._foresees = self._foresees and (is_current or not self._has_stepped)
        norms = pending if is_current else None
        votes = world.exchange(None if norms is None else norms.is_sharded)
        is_part = part_of(trainer) is not None
        # Reading norms of parts and shards is collective: either every rank has them or none reads.
        if norms is None or ((norms.is_sharded or is_part) and None in votes):
            return
        values = joined(world, norms.values()) if is_part else norms.values()
        self._writer.write_record(state.global_step, state.epoch, {"grad_norms": values})

    def on_train_end(self, **_: Any) -> None:
        self._is_off = True  # a later evaluate() follows no training step
        self.close()

    def close(self) -> None:
        """Close the file, which is a complete array at every instant."""
        self._writer.close()

    def state_dict(self) -> dict[str, Any]:
        return {"writer": self._writer.state_dict(), "foresees": self._foresees}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._writer.load_state_dict(state_dict["writer"])
        self._foresees = bool(state_dict["foresees"])


def evaluation_follows(args: Any, state: Any, control: TrainerControl, train_dataloader: Any) -> bool | None:
    """Return whether an evaluation follows the step that is about to run; None if that cannot be known.

    Called before the optimizer's step, when `state.global_step` does not count it yet. The last step counts as
    followed by an evaluation, because a run may evaluate at its end.
    """
    strategy = getattr(args, "eval_strategy", None)
    strategy = getattr(strategy, "value", strategy)  # Hugging Face's is an enum
    step = state.global_step + 1
    if control.should_evaluate:
        return True
    if strategy == "no":
        return False
    if step == state.max_steps:
        return True
    if strategy == "steps":
        every = getattr(state, "eval_steps", None) or getattr(args, "eval_steps", None)
        # Hugging Face also accepts a fraction of an epoch as eval_delay; only whole steps are considered here.
        is_late = step >= (getattr(args, "eval_delay", None) or 0)
        return (is_late and step % int(every) == 0) if every else None
    if strategy == "epoch":
        return True if control.should_epoch_stop else _ends_epoch(args, step, train_dataloader)
    return None


def _ends_epoch(args: Any, step: int, train_dataloader: Any) -> bool | None:
    try:
        batches = len(train_dataloader)
    except TypeError:  # no loader, or one without a length
        return None
    accumulated = getattr(args, "gradient_accumulation_steps", None) or 1
    steps = max(1, -(-batches // int(accumulated)))
    return step % steps == 0


def _why_no_gradients(model: Any) -> str | None:
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_in_backward_optimizers", None):
            return f"the optimizer runs within the backward pass, which leaves no gradient of {name!r}"
    return None
