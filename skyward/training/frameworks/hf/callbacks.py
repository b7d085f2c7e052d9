"""`HFCallbacks`: our callbacks in Hugging Face's `Trainer`, unchanged.

    trainer = transformers.Trainer(..., callbacks=[HFCallbacks([JsonLogger(), DivergenceDetector()])])

What differs from our `Trainer`, and what is done about it:

- HF logs the metrics of an evaluation and then reports them as well; ours reports them once. So that log is not passed
  on, and `on_evaluate` is.
- HF appends to `state.log_history` and calls its integrations (TensorBoard, ...) before a user's callbacks. This
  callback moves itself in front of them, so that what our callbacks add in `on_log_step` reaches them, and it adds it
  to the history too.
- HF's `logging_nan_inf_filter` makes a number of a loss that is not finite. Where no loss of an interval was finite our
  callbacks get NaN, as our Trainer logs it; HF's own record and its integrations have what HF shows.
- HF's stop saves nothing: here it asks for a checkpoint at every later event until there is one, unless
  `save_strategy` is "no". HF has no abort: from then on its control holds `should_save` and `should_evaluate` False,
  whatever is assigned to them, so that neither a save strategy nor another callback can save.
- What a user's own code logs within a step (`self.log` in `compute_loss`) is told to callbacks in a world of one rank
  only: others may not have logged it, and callbacks may talk to them.
- What callbacks ask for is passed on at the end of a step and after phases (log, evaluation, save, epoch), where ranks
  agree on it; never between two micro-batches, where ranks that disagree would part.
- State: HF writes JSON, by rank 0, from its ExportableState. Ours go in and out of it as they are, tensors too, and
  are restored on every resume, whether HF restores its own (`restore_callback_states_from_checkpoint`) or not.
- HF tells its callbacks nothing of a run that raises, so `close()` of ours is called at the end of a run only.
- `on_forward_backward_begin`/`_end` come from HF's events around them: the end of a step's last micro-batch is
  reported when gradients are clipped. `on_train_metrics` is not available: HF tells a loss only when it logs.
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

__all__ = ["HFCallbacks"]

_log = logging.getLogger(__name__)

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
"""What HF's control has."""
_ABORTED = {"should_training_stop": True, "should_save": False, "should_evaluate": False}
_NOT_FINITE = float("nan")
"""What callbacks get for a loss that the filter hides. It is known by identity, so that Hugging Face's own record of
the log stays as it is."""
_SILENT = {"on_train_metrics": "Hugging Face's Trainer tells a loss only when it logs; use on_log"}


if TYPE_CHECKING:
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_callback import TrainerCallback as HFCallback
else:
    _hf = load_framework("transformers.trainer_callback", extra="transformers")
    HFCallback, ExportableState = _hf.TrainerCallback, _hf.ExportableState


@checked_options
class HFCallbacks(HFCallback, ExportableState):  # type: ignore[misc]  # they are Any to mypy here
    """A callback of transformers' `Trainer` that runs ours. One for a trainer, with all of them in it.

    callbacks: as our `Trainer` takes them; HF's own may be among them.
    logging_dir: `args.logging_dir` for them, where JsonLogger and TBLogger write; None: `<output_dir>/logs`.
    ranks: of the run; None: those of torch's process group.

    Raises: UsageError for what is no callback.
    """

    __module__ = "skyward.training"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object with a class of its own, whose constructor returns that object.

        HF restores a callback's state by making a new object of its class, `type(callback)(**args)`, which could not
        know the callbacks that the user gave.
        """
        if "_only" not in cls.__dict__:
            own: Any = type(cls.__name__, (cls,), {"__doc__": cls.__doc__, "__module__": cls.__module__})
            own._only = object.__new__(own)
            return own._only
        return cls._only

    def __init__(
        self, callbacks: Iterable[object] = (), *, logging_dir: str | None = None, ranks: Ranks | None = None
    ) -> None:
        if "_bus" in self.__dict__:  # HF makes callbacks anew on resume; see __new__
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
        # Between the end of a step and the next one: every rank is here, and may agree.
        self._is_between_steps = True

    @property
    def callbacks(self) -> CallbackHandler:
        """Those that it was given; `add` and `remove` change them."""
        return self._bus

    # HF's events -----------------------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        self._meet()
        return self._fire("on_init_end", args, state, control, context, agree=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> Any:
        if not self._has_met:  # added to a trainer that was there already
            control = self.on_init_end(args, state, control, **context)
        self._meet()
        self._begin()
        if getattr(control, "_aborted", False):  # of an earlier train(): it never clears
            control = type(control).__mro__[1]()
        kept = state.stateful_callbacks.setdefault(type(self).__name__, {})  # resumed from a run that was without us
        if state.global_step > 0 and not self._is_restored and kept:
            # HF restores callbacks only where restore_callback_states_from_checkpoint says so, as it makes them anew.
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
            return control  # on_evaluate follows with the same
        if not self._is_between_steps and self._bus.ranks.world_size > 1:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("a log within a step is not told to callbacks, as other ranks may not have made it")
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
        folder = None  # of a trial of a hyperparameter search: HF does not tell
        if not state.is_hyper_param_search:
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        return self._fire("on_save", args, state, control, {**context, "checkpoint": folder}, agree=True)

    # HF's ExportableState --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What HF writes to a checkpoint's trainer_state.json."""
        return {"args": {}, "attributes": {"exported": self.exported}}

    @property
    def exported(self) -> Any:
        return to_json(self._bus.state_dict(), where="the state of callbacks")

    @exported.setter
    def exported(self, states: Any) -> None:
        self._bus.load_state_dict(from_json(states))
        self._is_restored = True

    # Within ----------------------------------------------------------------------------------------------------------

    def _fire(
        self, event: str, args: Any, state: Any, control: Any, context: dict[str, Any], *, agree: bool = False
    ) -> Any:
        """One event of ours; gives HF's control. Without `agree`, what is asked for waits for an event with it."""
        ours = self._control
        for flag in _FLAGS:
            setattr(ours, flag, getattr(control, flag) or flag in self._pending)
        model = unwrapped(context.get("model"))
        given = {"processing_class": None, **context, "model": model, "trainer": self._trainer}
        self._bus.fire(event, args=_Arguments(args, self._logging_dir), state=state, control=ours, **given)
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
        """Finds the trainer, stands in front of its integrations, and knows the ranks.

        HF gives a callback neither its trainer nor its place in the list; both stand on the stack that calls us, which
        is looked at here only, twice in a run.
        """
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
                "HFCallbacks was not called by a Trainer of transformers: what callbacks add to logs may not reach "
                "integrations that stand before it"
            )
            return
        # Behind the flow that sets the flags of a step. The list is being gone through: moving ourselves to the front
        # leaves what comes next as it is.
        others = [callback for callback in handler.callbacks if callback is not self]
        place = max((at + 1 for at, other in enumerate(others) if isinstance(other, hf.DefaultFlowCallback)), default=0)
        handler.callbacks[:] = [*others[:place], self, *others[place:]]


class _UnfilteredLosses:
    """Whether there was a finite loss since the last log, before HF's filter. Nothing is waited for until a log asks.

    With `logging_nan_inf_filter`, its default, a loss that is not finite is replaced by the mean of those before it in
    the interval, which is 0 at first: a run that has diverged logs a loss of 0. There is no event between the two.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._has_finite: Any = None  # a tensor where the losses are; None before the first loss

    def attach(self, trainer: Any) -> None:
        """Looks at each loss of this trainer until `detach`. Idempotent: a run that raises does not detach."""
        self.detach()
        if trainer is None:
            return

        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            self._note(loss)
            return loss

        step = put(self._undo, trainer, "training_step", training_step)

    def detach(self) -> None:
        """Gives the trainer its `training_step` back."""
        self._undo.close()
        self._has_finite = None

    def are_hidden(self, ranks: Ranks) -> bool:
        """Whether all losses of any rank since the last time were not finite. Collective. Begins the next interval."""
        has_finite, self._has_finite = self._has_finite, None
        return bool(ranks.flags(int(has_finite is not None and not bool(has_finite))))

    def _note(self, loss: Any) -> None:
        import torch

        if isinstance(loss, torch.Tensor):
            is_finite = torch.isfinite(loss.detach()).any()
            self._has_finite = is_finite if self._has_finite is None else self._has_finite | is_finite


class _Arguments:
    """HF's arguments, with `logging_dir`, which they have lost in version 5."""

    def __init__(self, args: Any, logging_dir: str | None) -> None:
        self._args = args
        self.logging_dir = logging_dir or getattr(args, "logging_dir", None) or os.path.join(args.output_dir, "logs")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


def _amend(
    history: list[dict[str, Any]], logs: MutableMapping[str, Any], shown: MutableMapping[str, Any], step: int
) -> None:
    """What callbacks have added to what they were shown, in HF's logs and its record of them too; as JSON can have it,
    which HF writes it to.
    """
    record = history[-1] if history and history[-1].get("step") == step else {}
    for name, value in list(shown.items()):
        if value is not _NOT_FINITE and (name not in record or record[name] is not value):
            shown[name] = logs[name] = record[name] = plain(value)


def _aborted(control: Any) -> Any:
    """A control of HF's that stops, and neither saves nor evaluates, whatever is assigned to it.

    Its name is that of HF's class: it is the key of its state in checkpoints.
    """
    kind = type(control)
    if getattr(control, "_aborted", False):
        return control

    def assign(self: Any, name: str, value: Any) -> None:
        object.__setattr__(self, name, _ABORTED.get(name, value))

    return type(kind.__name__, (kind,), {"_aborted": True, "__setattr__": assign})()
