"""What a training run tells its callbacks, and what they may answer. No framework is imported here.

A *producer* (our `Trainer`, or an adapter inside another framework's) owns the run's `args`, `TrainerState` and
`TrainerControl`, and fires the events below in the order of one run:

    on_init_end  on_train_begin
        on_epoch_begin
            on_step_begin
                on_forward_backward_begin  on_forward_backward_end     once for each micro-batch
                on_substep_end                                         after each micro-batch but a step's last
            on_pre_optimizer_step      gradients are clipped, parameters not yet changed
            on_optimizer_step          parameters are changed
            on_train_metrics           metrics=: loss, grad_norm, tokens of this step
            on_step_end                state.global_step counts this step now
            on_log_step  on_log        where something is logged: logs= may be added to in the first
            on_prediction_step ...  on_evaluate
            on_save
        on_epoch_end
    on_log (with train_runtime)  on_train_end

`on_predict` ends a `predict()`. Names and order of the events that Hugging Face's Trainer has are its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

__all__ = [
    "EVENTS",
    "ErrorPolicy",
    "RunsOn",
    "Stateful",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
]

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

ErrorPolicy = Literal["raise", "disable"]
"""What an exception in a callback does: it ends the run, on every rank; or it is warned of once, and the callback is
left out from then on."""

RunsOn = Literal["every_rank", "rank_zero"]


@runtime_checkable
class Stateful(Protocol):
    """What has a state that a checkpoint keeps: torch.distributed.checkpoint's protocol of that name."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


class TrainerCallback:
    """Base of callbacks. It has no handlers: define those that you want, and only those are ever called.

    A handler is named as its event and takes what it needs by keyword, and `**kwargs` for the rest:

        def on_log(self, args, state, control, logs, **kwargs): ...

    The first three may have other names, as in Hugging Face's callbacks: then they come by position.
    Every event gives `args`, `state`, `control`, `ranks` (the world; see `skyward.training.agree`), `model`
    (unwrapped), `processing_class`, `optimizer`, `lr_scheduler`, `train_dataloader`, `eval_dataloader`, `trainer`;
    some give more: `logs` (on_log_step, on_log), `metrics` (on_train_metrics, on_evaluate, on_predict), `checkpoint`,
    its path (on_save: it is durable now; from our Trainer `saved_step` too, which is earlier than `global_step` where
    it was written behind training). It changes `control` in place, or returns one of its own.

    A callback with `state_dict` and `load_state_dict` is kept in checkpoints under its `state_key`. On resume its
    state is loaded before `on_init_end`: what it needs of the run it must wait for until `on_train_begin`.
    """

    if not TYPE_CHECKING:  # or a checker would take any attribute for one that is there

        def __getattr__(self, name: str) -> Any:
            where = ""
            if name in EVENTS:  # somebody calls what is not defined: another framework's trainer, to which this is none
                where = (
                    "; only defined handlers are called, so give it to our Trainer, or to transformers' within "
                    "skyward.training.HFCallbacks([...])"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{where}")

    on_error: ErrorPolicy = "raise"
    """Callbacks that only watch should say "disable": they must not end a run of days."""
    runs_on: RunsOn = "every_rank"
    collective_events: frozenset[str] = frozenset()
    """Events in whose handler ranks talk to one another. All ranks call such a handler, in the same order, and each
    waits for the others' verdicts after it: one that raises raises on all."""

    @property
    def name(self) -> str:
        """As messages call it: the class's name."""
        return type(self).__name__

    @property
    def state_key(self) -> str:
        """Names its state in a checkpoint. Unique among a run's callbacks, and the same in the run that resumes:
        two of one class need keys of their own.
        """
        return type(self).__qualname__


@dataclass(kw_only=True)
class TrainerControl:
    """What callbacks ask of the run. Flags are applied at the end of a step; those of Hugging Face's mean the same."""

    should_training_stop: bool = False
    """End after this step; a checkpoint is saved first where the run saves any."""
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    should_abort_without_save: bool = False
    """With `should_training_stop`: end at once, without a last save or evaluation."""

    def stop(self) -> None:
        """Asks for an end with a last save."""
        self.should_training_stop = self.should_save = True

    def abort(self) -> None:
        """Asks for an end without one."""
        self.should_training_stop = self.should_abort_without_save = True
        self.should_save = self.should_evaluate = False

    def flags(self) -> int:
        """All flags as the bits of a number, the first field's the lowest."""
        return sum(1 << at for at, each in enumerate(fields(self)) if getattr(self, each.name))

    def set_flags(self, flags: int) -> None:
        """The inverse of `flags`."""
        for at, each in enumerate(fields(self)):
            setattr(self, each.name, bool(flags >> at & 1))


@dataclass(kw_only=True)
class TrainerState:
    """Where a run is. Fields that Hugging Face's has mean the same; it is kept in checkpoints.

    epoch: epochs done, with a fraction; None before the first. num_input_tokens_seen, total_flos: over all ranks.
    """

    epoch: float | None = None
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    """Of these three ours has none; Hugging Face's integrations look at them."""
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)
    """By `state_key`."""
