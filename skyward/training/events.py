"""Events of a training run, and the objects that callbacks receive with them. No framework is imported here.

A *producer* (our `Trainer`, or an adapter inside another framework's) owns the run's `args`, `TrainerState` and
`TrainerControl`, and fires the events below in the order of one run:

    on_init_end  on_train_begin
        on_epoch_begin
            on_step_begin
                on_forward_backward_begin  on_forward_backward_end     once for each micro-batch
                on_substep_end                                         after each micro-batch except a step's last
            on_pre_optimizer_step      gradients are clipped, parameters not yet changed
            on_optimizer_step          parameters are changed
            on_train_metrics           metrics=: loss, grad_norm, tokens of this step
            on_step_end                state.global_step now counts this step
            on_log_step  on_log        at a log; on_log_step may add to logs=
            on_prediction_step ...  on_evaluate
            on_save
        on_epoch_end
    on_log (with train_runtime)  on_train_end

`on_predict` ends a `predict()`. Events that Hugging Face's Trainer also has keep its names and order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_forward_backward_begin",
    "on_forward_backward_end",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_train_metrics",
    "on_step_end",
    "on_log_step",
    "on_log",
    "on_prediction_step",
    "on_evaluate",
    "on_predict",
    "on_save",
)
"""Names of all events. The module docstring shows their order in a run."""

ErrorPolicy = Literal["raise", "disable"]
"""Policy for an exception in a callback.

"raise" ends the run on every rank. "disable" logs one warning and never calls the callback again."""

RunsOn = Literal["every_rank", "rank_zero"]
"""Ranks on which a callback's handlers run."""


@runtime_checkable
class Stateful(Protocol):
    """Object whose state is kept in checkpoints; the protocol of that name in torch.distributed.checkpoint.

    Example:
        >>> from skyward.training import Stateful
        >>> class Counter:
        ...     count = 0
        ...     def state_dict(self): return {"count": self.count}
        ...     def load_state_dict(self, state_dict): self.count = state_dict["count"]
        >>> isinstance(Counter(), Stateful)
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state: numbers, text, tensors and arrays, nested in dicts, lists and tuples."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the state that `state_dict` returned."""


class TrainerCallback:
    """Base class of callbacks. It defines no handlers; only the handlers that a subclass defines are called.

    A handler has the name of its event. It names the keywords that it needs and takes the rest as `**kwargs`. If its
    first three parameters have other names, as in Hugging Face's callbacks, they receive `args`, `state` and `control`
    by position. A handler changes `control` in place, or returns another `TrainerControl`.

    Every event passes `args` (TrainingArguments), `state` (TrainerState), `control` (TrainerControl), `ranks` (Ranks),
    `model` (unwrapped), `processing_class`, `optimizer`, `lr_scheduler`, `train_dataloader`, `eval_dataloader` and
    `trainer`. Some events pass more:

    - `on_log_step`, `on_log`: `logs`, a dict. `on_log_step` may add to it.
    - `on_train_metrics`, `on_evaluate`, `on_predict`: `metrics`, a dict.
    - `on_save`: `checkpoint`, the path of a durable checkpoint. Our trainers also pass `saved_step`. It is smaller than
      `state.global_step` if the checkpoint was written in the background.

    A callback with `state_dict` and `load_state_dict` is kept in checkpoints under its `state_key`. A resumed run loads
    that state before `on_init_end`. State that depends on the run, such as the model, is ready in `on_train_begin`.

    All events of a run come from one thread.

    Example:
        >>> from skyward.training import TrainerCallback, TrainerControl, TrainerState
        >>> class StopAt(TrainerCallback):
        ...     def on_step_end(self, state, control, **kwargs):
        ...         if state.global_step >= 100:
        ...             control.stop()
        >>> control = TrainerControl()
        >>> StopAt().on_step_end(state=TrainerState(global_step=100), control=control)
        >>> control.should_training_stop
        True
    """

    if not TYPE_CHECKING:  # a type checker would believe that every attribute exists

        def __getattr__(self, name: str) -> Any:
            advice = ""
            # Another framework's trainer calls every handler of its own base class, which this class is not.
            if name in EVENTS:
                advice = (
                    "; pass it to our Trainer, which calls defined handlers only, or wrap it for transformers: "
                    "skyward.training.HFCallbacks([...])"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")

    on_error: ErrorPolicy = "raise"
    """Policy for exceptions: "raise" ends the run, "disable" disables the callback with a warning.

    Set "disable" in a callback that only observes, because it must not end a run of days."""
    runs_on: RunsOn = "every_rank"
    """Ranks on which handlers run: "every_rank" or "rank_zero". Collective events ignore it."""
    collective_events: frozenset[str] = frozenset()
    """Events whose handlers exchange data between ranks.

    All ranks call such a handler in the same order, and wait for one another after it. If it raises on one rank, it
    raises on all."""

    @property
    def name(self) -> str:
        """Name of the callback in messages: its class name."""
        return type(self).__name__

    @property
    def state_key(self) -> str:
        """Key of the callback's state in a checkpoint: its qualified class name.

        The key must be unique among a run's callbacks, and the same in the run that resumes. Override it where a run
        has two callbacks of one class.
        """
        return type(self).__qualname__


@dataclass(kw_only=True)
class TrainerControl:
    """Requests of callbacks to the run. The trainer applies them at the end of a step, on all ranks.

    Flags that Hugging Face's `TrainerControl` also has mean the same.

    Example:
        >>> from skyward.training import TrainerControl
        >>> control = TrainerControl()
        >>> control.save_and_stop()
        >>> control.should_training_stop, control.should_save
        (True, True)
    """

    should_training_stop: bool = False
    """End after this step. The trainer saves a checkpoint first, unless `save_strategy="no"`."""
    should_epoch_stop: bool = False
    """End the epoch after this step and go on with the next one."""
    should_save: bool = False
    """Save a checkpoint after this step."""
    should_evaluate: bool = False
    """Evaluate after this step."""
    should_log: bool = False
    """Log after this step."""
    should_abort_without_save: bool = False
    """End at once, without a last save or evaluation. Set `should_training_stop` too."""
    must_save: bool = field(default=False, init=False, repr=False)
    """The save of this step was requested beside the schedule's request, so it must not be skipped. Do not set it."""

    def __setattr__(self, name: str, value: object) -> None:
        # The schedule sets the flag first. A callback that sets it once more could not be told from the schedule.
        if name == "should_save":
            self.__dict__["must_save"] = bool(value) and self.__dict__.get(name, False)
        self.__dict__[name] = value

    def stop(self) -> None:
        """Request the end of training. A checkpoint is saved first, unless `save_strategy="no"`.

        `Client.stop()` and `skyward train stop` do the same.
        """
        self.should_training_stop = True

    def save_and_stop(self) -> None:
        """Request the end of training, with a last save whatever the `save_strategy`.

        `Client.save_and_stop()` and `skyward train save-stop` do the same.
        """
        self.should_training_stop = self.should_save = True

    def abort(self) -> None:
        """Request the end of training, without a last save or evaluation.

        `Client.abort()` and `skyward train abort` do the same.
        """
        self.should_training_stop = self.should_abort_without_save = True
        self.should_save = self.should_evaluate = False

    def flags(self) -> int:
        """Return all flags as the bits of a number; the first field is the lowest bit."""
        return sum(1 << bit for bit, flag in enumerate(fields(self)) if getattr(self, flag.name))

    def set_flags(self, flags: int) -> None:
        """Set all flags from a number that `flags` returned."""
        for bit, flag in enumerate(fields(self)):
            setattr(self, flag.name, bool(flags >> bit & 1))


@dataclass(kw_only=True)
class TrainerState:
    """Progress of a run. Checkpoints keep it; fields that Hugging Face's `TrainerState` also has mean the same.

    Example:
        >>> from skyward.training import TrainerState
        >>> state = TrainerState(global_step=50, max_steps=200)
        >>> state.global_step / state.max_steps
        0.25
    """

    epoch: float | None = None
    """Epochs done, with a fraction. None: training has not begun."""
    global_step: int = 0
    """Optimizer steps done."""
    max_steps: int = 0
    """Optimizer steps of the whole run."""
    logging_steps: int = 500
    """Steps between two logs; a share of all steps is resolved to a number here."""
    eval_steps: int = 500
    """Steps between two evaluations."""
    save_steps: int = 500
    """Steps between two checkpoints."""
    train_batch_size: int | None = None
    """Samples in one micro-batch of one rank."""
    num_train_epochs: int = 0
    """Epochs of the whole run, rounded up."""
    num_input_tokens_seen: int = 0
    """Tokens of all ranks up to the last log."""
    total_flos: float = 0
    """Floating-point operations of all ranks up to the last log."""
    log_history: list[dict[str, Any]] = field(default_factory=list)
    """All logs of the run, oldest first; each has its "step"."""
    best_metric: float | None = None
    """Best value of `metric_for_best_model` so far."""
    best_global_step: int | None = None
    """Step of that value."""
    best_model_checkpoint: str | None = None
    """Path of the checkpoint of that step."""
    is_local_process_zero: bool = True
    """Whether this is the first process of its machine."""
    is_world_process_zero: bool = True
    """Whether this is rank 0."""
    # Hugging Face's integrations read the next three. Our trainers do not use them.
    is_hyper_param_search: bool = False
    """Unused; Hugging Face's integrations read it."""
    trial_name: str | None = None
    """Unused; Hugging Face's integrations read it."""
    trial_params: dict[str, Any] | None = None
    """Unused; Hugging Face's integrations read it."""
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)
    """States of callbacks, by `state_key`."""
