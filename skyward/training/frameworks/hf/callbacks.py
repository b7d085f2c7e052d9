"""`HFCallbacks`: our callbacks in Hugging Face's `Trainer`, unchanged.

    trainer = transformers.Trainer(..., callbacks=[HFCallbacks([JsonLogger(), DivergenceDetector()])])

Hugging Face's Trainer (HF below) differs from ours, and the adapter compensates where it can:

- HF logs the metrics of an evaluation and reports them again; ours reports them once. The adapter drops that log and
  passes on `on_evaluate`.
- HF appends to `state.log_history` and calls its integrations (TensorBoard, ...) before a user's callbacks. The adapter
  moves itself in front of them. Values that our callbacks add in `on_log_step` therefore reach the integrations and the
  history.
- HF's `logging_nan_inf_filter` turns a loss that is not finite into a number. If no loss of an interval was finite, our
  callbacks receive NaN, which our Trainer would log. HF's own record and integrations keep HF's number.
- A stop in HF saves nothing. The adapter requests a checkpoint at every later event until there is one, unless
  `save_strategy` is "no".
- HF has no abort. After one, the adapter keeps `should_save` and `should_evaluate` of HF's control False, whatever is
  assigned to them, so that neither a save strategy nor another callback can save.
- Logs that a user's code writes within a step (`self.log` in `compute_loss`) are passed on only if there is one rank.
  Other ranks may not have logged, and callbacks may exchange data with them.
- Requests of callbacks are applied at the end of a step and after phases (log, evaluation, save, epoch), where ranks
  agree on them. Between two micro-batches, ranks with different requests would get out of step.
- HF writes state as JSON, on rank 0, from its ExportableState. The adapter keeps the states of our callbacks there,
  tensors included. They are restored on every resume, even without `restore_callback_states_from_checkpoint`.
- HF does not notify callbacks of a run that raises, so `close()` of a callback is called only at the end of a run.
- `on_forward_backward_begin` and `_end` are derived from HF's events around them. The end of a step's last micro-batch
  is reported when gradients are clipped.
- `on_train_metrics` is not available, because HF passes a loss only when it logs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, MutableMapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ....core.signatures import checked_options
from ...agree import Ranks, ranks_of_this_process
from ...bus import CallbackHandler
from ...callbacks.metrics import is_summary
from ...events import TrainerControl
from ...parts import unwrapped
from ..foreign import load_framework, on_the_stack, plain, put, warn_of_silence
from ..json_state import from_json, to_json

_log = logging.getLogger(__name__)

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
"""Flags of HF's control."""
_ABORTED = {"should_training_stop": True, "should_save": False, "should_evaluate": False}
_NOT_FINITE = float("nan")
"""Loss that callbacks receive in place of one that the filter hides. It is compared by identity, so that Hugging
Face's own record of the log stays unchanged."""
_SILENT = {"on_train_metrics": "Hugging Face's Trainer passes a loss only when it logs; use on_log"}


if TYPE_CHECKING:
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_callback import TrainerCallback as HFCallback
else:
    _hf = load_framework("transformers.trainer_callback", extra="transformers")
    HFCallback, ExportableState = _hf.TrainerCallback, _hf.ExportableState


@checked_options
class HFCallbacks(HFCallback, ExportableState):  # type: ignore[misc]  # they are Any to mypy here
    """Callback of transformers' `Trainer` that runs our callbacks. A trainer takes one, with all callbacks in it.

    Args:
        callbacks: instances or classes of `TrainerCallback`, or of Hugging Face's.
        logging_dir: `args.logging_dir` that callbacks see, the folder of JsonLogger and TBLogger. None:
            `<output_dir>/logs`.
        ranks: ranks of the run; None: those of torch's process group.

    Raises:
        UsageError: an object is not a callback.

    Example:
        Log to JSON and stop a diverged run of Hugging Face's Trainer::

            callbacks = HFCallbacks([JsonLogger(), DivergenceDetector()])
            transformers.Trainer(model, args, train_dataset=data, callbacks=[callbacks]).train()
    """

    __module__ = "skyward.training"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object with a class of its own, whose constructor returns that object."""
        # HF restores a callback's state by making a new object of its class, `type(callback)(**args)`. A new object
        # would not have the user's callbacks, so this one must be returned again.
        if "_only" not in cls.__dict__:
            own: Any = type(cls.__name__, (cls,), {"__doc__": cls.__doc__, "__module__": cls.__module__})
            own._only = object.__new__(own)
            return own._only
        return cls._only

    def __init__(
        self, callbacks: Iterable[object] = (), *, logging_dir: str | None = None, ranks: Ranks | None = None
    ) -> None:
        if "_bus" in self.__dict__:  # HF constructs callbacks again on resume; see __new__
            return
        self._bus = CallbackHandler(callbacks)
        self._logging_dir = logging_dir
        self._given_ranks = ranks
        self._trainer: Any = None
        self._losses = _UnfilteredLosses()
        self._has_met = self._is_restored = self._has_warned = False
        self._begin()

    def _begin(self) -> None:
        self._control = TrainerControl()
        self._pending: set[str] = set()
        self._is_stopping = False
        self._saved_step: int | None = None
        self._is_evaluating = False
        # Between the end of a step and the next one, all ranks fire the same events, so they can agree.
        self._is_between_steps = True

    @property
    def callbacks(self) -> CallbackHandler:
        """Our callbacks; `add` and `remove` change them."""
        return self._bus

    # HF's events -----------------------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._meet()
        return self._fire("on_init_end", args, state, control, context, agree=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        if not self._has_met:  # added after the trainer was made, so HF's on_init_end was missed
            control = self.on_init_end(args, state, control, **context)
        self._meet()
        self._begin()
        if getattr(control, "_aborted", False):  # the control of an aborted train() never clears
            control = type(control).__mro__[1]()
        kept = state.stateful_callbacks.setdefault(type(self).__name__, {})  # missing if the saved run had no adapter
        if state.global_step > 0 and not self._is_restored and kept:
            # HF restores callbacks only with restore_callback_states_from_checkpoint. Ours are always restored.
            self.exported = kept["attributes"]["exported"]
        self._is_restored = False
        if args.logging_nan_inf_filter:
            self._losses.attach(self._trainer)
        warn_of_silence(self._bus, _SILENT)
        return self._fire("on_train_begin", args, state, control, context, agree=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        try:
            return self._fire("on_train_end", args, state, control, context, agree=True)
        finally:
            self._losses.detach()
            self._bus.close()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        return self._fire("on_epoch_begin", args, state, control, context, agree=True)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._is_between_steps = True
        return self._fire("on_epoch_end", args, state, control, context, agree=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._is_between_steps = self._is_evaluating = False
        control = self._fire("on_step_begin", args, state, control, context)
        return self._fire("on_forward_backward_begin", args, state, control, context)

    def on_substep_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        control = self._fire("on_forward_backward_end", args, state, control, context)
        control = self._fire("on_substep_end", args, state, control, context)
        return self._fire("on_forward_backward_begin", args, state, control, context)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        control = self._fire("on_forward_backward_end", args, state, control, context)
        return self._fire("on_pre_optimizer_step", args, state, control, context)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        return self._fire("on_optimizer_step", args, state, control, context)

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._is_between_steps = True
        return self._fire("on_step_end", args, state, control, context, agree=True)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._is_evaluating = True
        return self._fire("on_prediction_step", args, state, control, context)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **context: Any) -> Any:
        if not logs or self._is_evaluating or any(name.startswith("eval_") for name in logs):
            return control  # on_evaluate follows with the same metrics
        if not self._is_between_steps and self._bus.ranks.world_size > 1:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("HFCallbacks drops a log within a step, because other ranks may not have made it")
            return control
        shown = logs
        if args.logging_nan_inf_filter and "loss" in logs and self._is_between_steps:
            shown = {**logs, "loss": _NOT_FINITE} if self._losses.are_hidden(self._bus.ranks) else logs
        context = {**context, "logs": shown}
        if not is_summary(logs):
            control = self._fire("on_log_step", args, state, control, context)
            _amend(state.log_history, logs, shown, state.global_step)
        return self._fire("on_log", args, state, control, context, agree=self._is_between_steps)

    def on_evaluate(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._is_evaluating = False
        return self._fire("on_evaluate", args, state, control, context, agree=True)

    def on_predict(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._is_evaluating = False
        return self._fire("on_predict", args, state, control, context, agree=True)

    def on_save(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._saved_step = state.global_step
        folder = None  # HF does not pass the folder of a trial of a hyperparameter search
        if not state.is_hyper_param_search:
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        return self._fire("on_save", args, state, control, {**context, "checkpoint": folder}, agree=True)

    # HF's ExportableState --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the states that HF writes to a checkpoint's trainer_state.json."""
        return {"args": {}, "attributes": {"exported": self.exported}}

    @property
    def exported(self) -> Any:
        """States of our callbacks as JSON types; assigning them restores the callbacks."""
        return to_json(self._bus.state_dict(), where="the state of callbacks")

    @exported.setter
    def exported(self, states: Any) -> None:
        self._bus.load_state_dict(from_json(states))
        self._is_restored = True

    # Within ----------------------------------------------------------------------------------------------------------

    def _fire(
        self, event: str, args: Any, state: Any, control: Any, context: dict[str, Any], *, agree: bool = False
    ) -> Any:
        """Fire an event for callbacks and return HF's control. Without `agree`, requests wait for an event with it."""
        ours = self._control
        for flag in _FLAGS:
            setattr(ours, flag, getattr(control, flag) or flag in self._pending)
        model = unwrapped(context.get("model"))
        whole = {"processing_class": None, **context, "model": model, "trainer": self._trainer}
        self._bus.fire(event, args=_Arguments(args, self._logging_dir), state=state, control=ours, **whole)
        if not agree:
            self._pending = {flag for flag in _FLAGS if getattr(ours, flag) and not getattr(control, flag)}
            return control
        self._bus.agree(ours)
        self._pending = set()
        if ours.should_abort_without_save:
            return _aborted(control)
        self._is_stopping |= ours.should_training_stop and not control.should_training_stop
        for flag in _FLAGS:
            setattr(control, flag, getattr(ours, flag))
        if self._is_stopping and args.save_strategy != "no" and self._saved_step != state.global_step:
            control.should_save = True
        return control

    def _meet(self) -> None:
        """Find the trainer and the ranks, and move in front of the trainer's integrations."""
        # HF passes callbacks neither their trainer nor their place in the list, so both are found on the stack. Walking
        # the stack is slow; it happens only here, twice in a run.
        self._has_met = True
        if self._bus.ranks.world_size == 1:
            self._bus = CallbackHandler(list(self._bus), ranks=self._given_ranks or ranks_of_this_process())
        hf = sys.modules.get("transformers.trainer")
        if hf is None:
            return
        self._trainer = on_the_stack(hf.Trainer) or self._trainer
        handler = on_the_stack(hf.CallbackHandler)
        if handler is None or not any(callback is self for callback in handler.callbacks):
            _log.warning(
                "HFCallbacks was not called by a Trainer of transformers: values that callbacks add to logs may not "
                "reach integrations before it in the list"
            )
            return
        # Behind DefaultFlowCallback, which sets the flags of a step. HF is iterating over the list at this moment.
        # Moving this callback to the front does not change which callbacks come next.
        others = [callback for callback in handler.callbacks if callback is not self]
        place = max((at + 1 for at, other in enumerate(others) if isinstance(other, hf.DefaultFlowCallback)), default=0)
        handler.callbacks[:] = [*others[:place], self, *others[place:]]


class _UnfilteredLosses:
    """Observer of losses before HF's filter: was one finite since the last log? It waits for the device only at a log.

    With `logging_nan_inf_filter`, HF's default, a loss that is not finite is replaced by the mean of the losses before
    it in the interval, at first 0. A diverged run therefore logs a loss of 0.
    """

    # HF has no event between the loss and the filter, so the trainer's training_step is wrapped.

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._has_finite: Any = None  # a tensor on the device of the losses; None before the first loss

    def attach(self, trainer: Any) -> None:
        """Observe each loss of this trainer until `detach`. Idempotent, because a run that raises does not detach."""
        self.detach()
        if trainer is None:
            return

        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            self._note(loss)
            return loss

        step = put(self._undo, trainer, "training_step", training_step)

    def detach(self) -> None:
        """Restore the trainer's `training_step`."""
        self._undo.close()
        self._has_finite = None

    def are_hidden(self, ranks: Ranks) -> bool:
        """Return whether some rank had no finite loss since the last call. Collective; begins the next interval."""
        has_finite, self._has_finite = self._has_finite, None
        return bool(ranks.flags(int(has_finite is not None and not bool(has_finite))))

    def _note(self, loss: Any) -> None:
        import torch

        if isinstance(loss, torch.Tensor):
            is_finite = torch.isfinite(loss.detach()).any()
            self._has_finite = is_finite if self._has_finite is None else self._has_finite | is_finite


class _Arguments:
    """HF's arguments with `logging_dir`, which version 5 of transformers removed."""

    def __init__(self, args: Any, logging_dir: str | None) -> None:
        self._args = args
        self.logging_dir = logging_dir or getattr(args, "logging_dir", None) or os.path.join(args.output_dir, "logs")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


def _amend(
    history: list[dict[str, Any]], logs: MutableMapping[str, Any], shown: MutableMapping[str, Any], step: int
) -> None:
    """Copy values that callbacks added to `shown` to HF's logs and history, as JSON types: HF writes them."""
    record = history[-1] if history and history[-1].get("step") == step else {}
    for name, value in list(shown.items()):
        if value is not _NOT_FINITE and (name not in record or record[name] is not value):
            shown[name] = logs[name] = record[name] = plain(value)


def _aborted(control: Any) -> Any:
    """Return a control of HF's that stops, and neither saves nor evaluates, whatever is assigned to it."""
    # It has the name of HF's class, because that is the key of its state in checkpoints.
    kind = type(control)
    if getattr(control, "_aborted", False):
        return control

    def assign(self: Any, name: str, value: Any) -> None:
        object.__setattr__(self, name, _ABORTED.get(name, value))

    return type(kind.__name__, (kind,), {"_aborted": True, "__setattr__": assign})()
