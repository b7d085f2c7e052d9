"""`KerasCallbacks`: our callbacks in Keras 3's `fit`, on any of its backends.

    model.fit(..., callbacks=[KerasCallbacks([JsonLogger(), DivergenceDetector()], logging_steps=50)])

What differs from our `Trainer`, and what is done about it:

- Steps: Keras knows batches. `global_step` counts optimizer steps, as `optimizer.iterations` does: it goes on where an
  earlier `fit` ended, and with gradient accumulation the batches between end with `on_substep_end`. With
  `steps_per_execution=n` a step's events come once for n batches, and `global_step` grows by n.
- Losses: Keras gives means since the epoch began. `loss` of a log is the mean over its own steps, by the loss's own
  sums. Other metrics of the model are as Keras has them, since the epoch began; `learning_rate` is the next step's. The
  `loss` of `on_train_metrics` is a difference of means that counts batches as equally large, on the JAX backend.
- Logs: one for each epoch, or every `logging_steps` steps.
- Order: an evaluation comes before the epoch's end. Its metrics are told once, by `on_evaluate`, named `eval_...`.
- JAX: a step's weights are not in the model until it is asked for them, which costs time. They are for `on_log_step`,
  `on_log`, `on_evaluate`, `on_save` and at both ends of epochs and training; elsewhere call `model.jax_state_sync()`.
- Saves: `<output_dir>/checkpoint-<step>.weights.h5`, with the optimizer's state, by `model.save_weights`, and the
  callbacks' states beside it in `checkpoint-<step>.state.json`. `resume_from_checkpoint` loads both when `fit` begins
  and lets it begin with the epoch that was not finished; Keras cannot skip the batches of it that were. What Keras's
  own `ModelCheckpoint` and `BackupAndRestore` write is not told by `on_save`.
- Stop: `model.stop_training`, after a checkpoint. Keras evaluates what it has stopped; after an abort one batch only,
  which is not reported.
- Not available: the events between a step's beginning and its end, `should_epoch_stop`, `should_evaluate`. It is said
  once.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ....core.signatures import checked_options
from ....errors import UsageError
from ...agree import Ranks
from ...bus import CallbackHandler
from ...parts import unwrapped
from ..foreign import load_framework, warn_of_silence
from ..json_state import from_json, to_json
from ..run import CallbackRun, as_eval_metrics

__all__ = ["KerasCallbacks", "steps_taken"]

_log = logging.getLogger(__name__)

_WHY = "Keras does forward, backward and optimizer step as one"
_SILENT = {
    "on_forward_backward_begin": _WHY,
    "on_forward_backward_end": _WHY,
    "on_pre_optimizer_step": f"{_WHY}, and shows no gradients",
    "on_optimizer_step": f"{_WHY}; use on_step_end",
}
_IN_STEPS = frozenset(("on_step_begin", "on_substep_end", "on_train_metrics", "on_step_end", "on_prediction_step"))
"""Events for which JAX's weights are not brought back to the model."""
_WEIGHTS, _STATE = ".weights.h5", ".state.json"


if TYPE_CHECKING:
    from keras.callbacks import Callback
else:
    Callback = load_framework("keras", extra="keras").callbacks.Callback


@checked_options
class KerasCallbacks(Callback):  # type: ignore[misc]  # its base is Any to mypy here
    """A callback of Keras's `fit`, `evaluate` and `predict` that runs ours. All of them in one.

    callbacks: as our `Trainer` takes them.
    output_dir: where checkpoints that callbacks ask for go; None: `trainer_output` in the working folder.
    logging_dir: `args.logging_dir` for them; None: `<output_dir>/logs`.
    logging_steps: optimizer steps from one log to the next, >= 1; None: one log at the end of each epoch.
    save_at_stop: whether a stop writes a checkpoint first.
    resume_from_checkpoint: one of these to go on from, `...weights.h5`; True: the newest in output_dir with finite
        weights.
    ranks: of the run; None: those of torch's process group. On other backends give them, or let callbacks decide alike
        in each process.

    Raises: UsageError for what is no callback, or a logging_steps that is not legal; in `fit`, for a checkpoint that
        is not there.
    """

    __module__ = "skyward.training"

    model: Any
    params: dict[str, Any] | None
    _model: Any

    def __init__(
        self,
        callbacks: Iterable[object] = (),
        *,
        output_dir: str | os.PathLike[str] | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        logging_steps: int | None = None,
        save_at_stop: bool = True,
        resume_from_checkpoint: bool | str | os.PathLike[str] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self._run = CallbackRun(
            callbacks,
            output_dir=output_dir,
            logging_dir=logging_dir,
            logging_steps=logging_steps,
            saves_at_stop=save_at_stop,
            ranks=ranks,
        )
        self._resume = resume_from_checkpoint
        self._side = _Side(self)
        self._is_in_fit = self._is_in_step = self._is_first_epoch = False
        self._begins_at = 0  # the optimizer's steps when this fit began
        self._batches = 0  # of this fit
        self._epoch = self._batches_of_epoch = 0
        self._batches_in_epoch: int | None = None  # once they are known
        self._sums = (0.0, 0.0)  # of the epoch's losses, and what they weigh, when they were last looked at

    @property
    def callbacks(self) -> CallbackHandler:
        """Those that it was given; `add` and `remove` change them."""
        return self._run.bus

    # A run -----------------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        self._meet()
        self._is_in_fit, self._is_in_step, self._is_first_epoch = True, False, True
        self._batches, self._batches_in_epoch = 0, (self.params or {}).get("steps")
        self._fill()
        warn_of_silence(self._run.bus, _SILENT)
        self._load_checkpoint()
        self._run.init_end()
        self._begins_at = steps_taken(self)
        self._run.begin(global_step=self._begins_at)

    def on_train_end(self, logs: Any = None) -> None:
        self._is_in_fit = False
        self._side.model._initial_epoch = None  # what a resume has set, as Keras's own BackupAndRestore does
        self._run.end()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._batches_of_epoch, self._sums = epoch, 0, (0.0, 0.0)
        self._side.epoch_begins()
        state, args = self._run.state, self._run.args
        state.epoch = float(epoch)
        if self._is_first_epoch and self._batches_in_epoch:
            self._is_first_epoch = False
            left = (args.num_train_epochs - epoch) * self._batches_in_epoch
            state.max_steps = args.max_steps = self._begins_at + int(left) // args.gradient_accumulation_steps
        self._run.fire("on_epoch_begin")
        self._run.settle()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._take_losses()
        self._side.metrics = {name: value for name, value in (logs or {}).items() if not name.startswith("val_")}
        is_whole = self._batches_in_epoch is None or self._batches_of_epoch >= self._batches_in_epoch
        if self._batches_in_epoch is None and not self._side.model.stop_training:
            self._batches_in_epoch = self._batches_of_epoch
        self._run.state.global_step = max(self._run.state.global_step, steps_taken(self))
        self._run.epoch_end(epoch + 1.0 if is_whole else self._run.state.epoch or 0.0)

    # A step ----------------------------------------------------------------------------------------------------------

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._is_in_step:
            self._is_in_step = True
            self._run.step_begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # `batch` is the last of its execution, of which the epoch's last one may have fewer.
        done = batch + 1 if self._batches_in_epoch is None else min(batch + 1, self._batches_in_epoch)
        self._batches += done - self._batches_of_epoch
        self._batches_of_epoch = done
        run, accumulated = self._run, self._run.args.gradient_accumulation_steps
        self._side.note(logs or {}, done)
        step = self._begins_at + self._batches // accumulated
        if step == run.state.global_step:
            run.fire("on_substep_end")
            return
        self._is_in_step = False
        if run.bus.listens("on_train_metrics"):
            run.fire("on_train_metrics", metrics={"loss": self._side.step_loss(), "grad_norm": None, "tokens": 0})
        part = done / self._batches_in_epoch if self._batches_in_epoch else 0.0
        run.step_end(global_step=step, epoch=self._epoch + part)

    # Evaluation and prediction ---------------------------------------------------------------------------------------

    def on_test_begin(self, logs: Any = None) -> None:
        if not self._is_in_fit:
            self._meet()
        else:
            self._take_losses()  # Keras's evaluation begins its metrics anew
            if self._run.is_aborted:
                self._side.model.stop_evaluating = True
        self._run.evaluation_begins()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if not (self._is_in_fit and self._run.is_aborted):
            self._run.fire("on_prediction_step")

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self._run.fire("on_prediction_step")

    def on_test_end(self, logs: Any = None) -> None:
        if not (self._is_in_fit and self._run.is_aborted):
            self._run.evaluated(as_eval_metrics(logs or {}))
        self._sums = self._side.sums()  # nothing more of this epoch's training

    def evaluated_beside(self, metrics: dict[str, Any], *, step: int, epoch: float) -> None:
        """What an evaluation beside training gave, of the weights of an earlier step. On all ranks, within `fit`."""
        self._run.evaluated_beside(as_eval_metrics(metrics), step=step, epoch=epoch)

    def on_predict_begin(self, logs: Any = None) -> None:
        self._meet()

    def on_predict_end(self, logs: Any = None) -> None:
        self._run.fire("on_predict", metrics={})
        self._run.bus.agree(self._run.control)

    # Within ----------------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        self._run.meet(self._side, output_dir="trainer_output")
        self._run.before_log = self._take_losses

    def _fill(self) -> None:
        """`args` and `state`, of what Keras was told."""
        args, state, params = self._run.args, self._run.state, self.params or {}
        args.num_train_epochs = state.num_train_epochs = int(params.get("epochs") or 0)
        args.gradient_accumulation_steps = int(self._side.optimizer.gradient_accumulation_steps or 1)
        args.disable_tqdm = not params.get("verbose")
        args.logging_strategy = "epoch" if self._run.logging_steps is None else "steps"
        per_epoch = (self._batches_in_epoch or 500) // args.gradient_accumulation_steps
        state.logging_steps = args.logging_steps = self._run.logging_steps or max(1, per_epoch)
        state.max_steps = args.max_steps = steps_taken(self) + args.num_train_epochs * per_epoch

    def _take_losses(self) -> None:
        """What the losses have grown by since they were last looked at goes into the next log."""
        if not self._is_in_fit:
            return
        now, before = self._side.sums(), self._sums
        self._sums = now
        if now[1] > before[1]:
            self._run.took(loss=(now[0] - before[0]) / (now[1] - before[1]), weight=now[1] - before[1])

    def _load_checkpoint(self) -> None:
        if not self._resume:
            return
        folder = self._run.args.output_dir
        weights = _newest(folder) if self._resume is True else os.fspath(self._resume)
        state = weights.removesuffix(_WEIGHTS) + _STATE
        if not weights.endswith(_WEIGHTS) or not os.path.isfile(weights) or not os.path.isfile(state):
            raise UsageError(
                f"resume_from_checkpoint={weights!r}: there is no such file ending in {_WEIGHTS} with its {_STATE} "
                "beside it; these are what KerasCallbacks saves"
            )
        self._resume = None  # once: a second fit goes on from the first
        if not self._side.optimizer.built:
            self._side.optimizer.build(self.model.trainable_variables)
        self.model.load_weights(weights)
        with open(state, encoding="utf-8") as file:
            kept = json.load(file)
        self._run.load_state_dict(from_json(kept["run"]))
        self._side.model._initial_epoch = int(kept["epoch"] or 0)


class _Side:
    """Keras's side of a run: a `Framework`."""

    def __init__(self, owner: KerasCallbacks) -> None:
        self._owner = owner
        self.metrics: dict[str, Any] = {}
        self._warned: set[str] = set()
        self.epoch_begins()

    def epoch_begins(self) -> None:
        self._mean = (0.0, 0)  # Keras's loss since the epoch began, over so many batches
        self._step_began = (0.0, 0.0)  # `sums` where the last step ended

    @property
    def model(self) -> Any:
        """The model as it is: JAX's weights may be elsewhere."""
        return unwrapped(self._owner._model)

    @property
    def optimizer(self) -> Any:
        return self.model.optimizer

    def context(self, event: str) -> dict[str, Any]:
        model = self.model if event in _IN_STEPS else self._owner.model
        return {"model": model, "optimizer": self.optimizer, "trainer": None}

    def note(self, logs: dict[str, Any], batches: int) -> None:
        """Keras's logs after so many of the epoch's batches."""
        self.metrics = logs
        if "loss" in logs:
            self._mean = (logs["loss"], batches)

    def step_loss(self) -> float | None:
        """Of the step that ends now."""
        # JAX's sums would have to be brought back to the model first, at each step.
        now = self._sums_by_batches() if _is_jax() else self.sums()
        before, self._step_began = self._step_began, now
        return (now[0] - before[0]) / (now[1] - before[1]) if now[1] > before[1] else None

    def sums(self) -> tuple[float, float]:
        """Of the epoch's losses so far, and what they weigh."""
        for metric in self._owner.model.metrics:
            if metric.name == "loss" and hasattr(metric, "total") and hasattr(metric, "count"):
                return float(metric.total), float(metric.count)
        return self._sums_by_batches()  # a model with a training step of its own

    def _sums_by_batches(self) -> tuple[float, float]:
        mean, batches = self._mean
        return mean * batches, float(batches)

    def logs(self) -> dict[str, Any]:
        rate = float(self._owner.model.optimizer.learning_rate)
        others = {name: value for name, value in self.metrics.items() if name != "loss"}
        return {"learning_rate": rate, **others}

    def save(self, folder: str, step: int) -> str:
        path = os.path.join(folder, f"checkpoint-{step}{_WEIGHTS}")
        run = self._owner._run
        if run.state.is_world_process_zero:
            os.makedirs(folder, exist_ok=True)
            kept = {
                "epoch": run.state.epoch,
                "is_finite": _is_finite(self._owner.model),
                "run": to_json(run.state_dict(), where="the state of callbacks"),
            }
            # Each file is whole or not there, and the weights, by which a checkpoint is found, come last.
            state = os.path.join(folder, f"checkpoint-{step}{_STATE}")
            with open(f"{state}.tmp", "w", encoding="utf-8") as file:
                json.dump(kept, file)
            os.replace(f"{state}.tmp", state)
            unfinished = os.path.join(folder, f"unfinished-{step}{_WEIGHTS}")
            self._owner.model.save_weights(unfinished, overwrite=True)
            os.replace(unfinished, path)
        return path

    def stop(self) -> None:
        self.model.stop_training = True

    abort = stop

    def stop_epoch(self) -> None:
        self._warn("should_epoch_stop", "Keras ends an epoch with its data only; use fit(steps_per_epoch=)")

    def evaluate(self) -> None:
        self._warn("should_evaluate", "Keras evaluates at the end of epochs only; use fit(validation_freq=)")

    def _warn(self, flag: str, why: str) -> None:
        if flag not in self._warned:
            self._warned.add(flag)
            _log.warning("%s: %s", flag, why)


def steps_taken(callback: Any) -> int:
    """Return how many steps the optimizer has made, of the `model` of a callback: JAX's are brought back to that."""
    return int(callback.model.optimizer.iterations)


def _is_jax() -> bool:
    import keras

    return bool(keras.config.backend() == "jax")


def _is_finite(model: Any) -> bool:
    import numpy as np

    return all(bool(np.isfinite(get_weight).all()) for get_weight in model.get_weights())


def _newest(folder: str) -> str:
    """The checkpoint of the last step, passing over those whose weights were not finite.

    Raises: UsageError where there is none.
    """
    weights = {
        int(match[1]): match[0]
        for name in (os.listdir(folder) if os.path.isdir(folder) else [])
        for match in [re.fullmatch(r"checkpoint-(\d+)\.weights\.h5", name)]
        if match is not None
    }
    for step in sorted(weights, reverse=True):
        path = os.path.join(folder, weights[step])
        if _state_beside(path).get("is_finite") is not False:
            return path
        _log.warning("%s: passed over, its weights are not finite (pass its path to load it all the same)", path)
    raise UsageError(f"resume_from_checkpoint=True: {folder} has no checkpoint-<step>{_WEIGHTS} to go on from")


def _state_beside(weights: str) -> Any:
    try:
        with open(weights.removesuffix(_WEIGHTS) + _STATE, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:  # which is said where the checkpoint is loaded
        return {}
