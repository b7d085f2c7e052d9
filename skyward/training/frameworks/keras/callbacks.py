"""`KerasCallbacks`: our callbacks in Keras 3's `fit`, on any backend.

    model.fit(..., callbacks=[KerasCallbacks([JsonLogger(), DivergenceDetector()], logging_steps=50)])

Keras differs from our `Trainer`, and the adapter compensates where it can:

- Steps: Keras counts batches. `global_step` counts optimizer steps, as `optimizer.iterations` does, and goes on where
  an earlier `fit` ended. With gradient accumulation, the batches within a step end with `on_substep_end`. With
  `steps_per_execution=n`, a step's events come once for n batches, and `global_step` grows by n.
- Losses: Keras reports means since the beginning of the epoch. The `loss` of a log is the mean over its own steps.
  Other metrics of the model are Keras's means since the beginning of the epoch. `learning_rate` is that of the next
  step. On the JAX backend, the `loss` of `on_train_metrics` is a difference of means, as if all batches had one size.
- Logs: one for each epoch, or every `logging_steps` steps.
- Order: an evaluation precedes the end of its epoch. `on_evaluate` reports its metrics once, named `eval_...`.
- JAX: the model receives a step's weights only on request, which costs time. The adapter requests them for
  `on_log_step`, `on_log`, `on_evaluate`, `on_save`, and at both ends of epochs and training. Call
  `model.jax_state_sync()` elsewhere.
- Saves: `model.save_weights` writes `<output_dir>/checkpoint-<step>.weights.h5` with the optimizer's state. The states
  of callbacks are in `checkpoint-<step>.state.json`. `on_save` does not report files of Keras's own `ModelCheckpoint`
  and `BackupAndRestore`.
- Resume: `resume_from_checkpoint` loads both files when `fit` begins, and starts with the epoch that was not finished.
  Keras cannot skip that epoch's batches which were already trained.
- Stop: `model.stop_training`, after a checkpoint. Keras still evaluates after a stop. After an abort, the adapter
  limits that to one batch and does not report it.
- Not available, with one warning: events within a step, `should_epoch_stop` and `should_evaluate`.
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

_log = logging.getLogger(__name__)

_WHY = "Keras runs forward, backward and optimizer step as one call"
_SILENT = {
    "on_forward_backward_begin": _WHY,
    "on_forward_backward_end": _WHY,
    "on_pre_optimizer_step": f"{_WHY}, and shows no gradients",
    "on_optimizer_step": f"{_WHY}; use on_step_end",
}
_IN_STEPS = frozenset(("on_step_begin", "on_substep_end", "on_train_metrics", "on_step_end", "on_prediction_step"))
"""Events for which JAX's weights are not copied to the model."""
_WEIGHTS, _STATE = ".weights.h5", ".state.json"


if TYPE_CHECKING:
    from keras.callbacks import Callback
else:
    Callback = load_framework("keras", extra="keras").callbacks.Callback


@checked_options
class KerasCallbacks(Callback):  # type: ignore[misc]  # its base is Any to mypy here
    """Callback of Keras's `fit`, `evaluate` and `predict` that runs our callbacks. Pass one, with all callbacks in it.

    Args:
        callbacks: instances or classes of `TrainerCallback`.
        output_dir: folder of checkpoints that callbacks request; None: `trainer_output` in the working folder.
        logging_dir: `args.logging_dir` that callbacks see; None: `<output_dir>/logs`.
        logging_steps: optimizer steps between two logs, at least 1; None: log at the end of each epoch.
        save_at_stop: write a checkpoint before a stop.
        resume_from_checkpoint: path of a `.weights.h5` checkpoint to resume. True: the newest in `output_dir` with
            finite weights.
        ranks: ranks of the run; None: those of torch's process group. On other backends pass them, or make sure that
            callbacks decide alike in each process.

    Raises:
        UsageError: an object is not a callback, or `logging_steps` is out of range; in `fit`: there is no checkpoint.

    Example:
        Log to JSON every 50 steps and stop a diverged fit::

            callbacks = KerasCallbacks([JsonLogger(), DivergenceDetector()], output_dir="out", logging_steps=50)
            model.fit(x, y, epochs=3, callbacks=[callbacks])
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
        self._begins_at = 0  # optimizer steps when this fit began
        self._batches = 0  # batches of this fit
        self._epoch = self._batches_of_epoch = 0
        self._batches_in_epoch: int | None = None  # None until known
        self._sums = (0.0, 0.0)  # sum of the epoch's losses and of their weights, at the last log

    @property
    def callbacks(self) -> CallbackHandler:
        """Our callbacks; `add` and `remove` change them."""
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
        self._side.model._initial_epoch = None  # set by a resume, as by Keras's own BackupAndRestore
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
        # `batch` is the last one of its execution. The epoch's last execution may have fewer batches than the others.
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
            self._take_losses()  # now, because Keras resets its metrics for an evaluation
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
        self._sums = self._side.sums()  # the metrics now hold the evaluation's losses, which must not count

    def evaluated_beside(self, metrics: dict[str, Any], *, step: int, epoch: float) -> None:
        """Report an asynchronous evaluation of an earlier step's weights. Call it on all ranks, within `fit`.

        Args:
            metrics: its metrics.
            step: the step whose weights were evaluated.
            epoch: epochs trained at that step.
        """
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
        """Fill `args` and `state` with Keras's settings."""
        args, state, params = self._run.args, self._run.state, self.params or {}
        args.num_train_epochs = state.num_train_epochs = int(params.get("epochs") or 0)
        args.gradient_accumulation_steps = int(self._side.optimizer.gradient_accumulation_steps or 1)
        args.disable_tqdm = not params.get("verbose")
        args.logging_strategy = "epoch" if self._run.logging_steps is None else "steps"
        per_epoch = (self._batches_in_epoch or 500) // args.gradient_accumulation_steps
        state.logging_steps = args.logging_steps = self._run.logging_steps or max(1, per_epoch)
        state.max_steps = args.max_steps = steps_taken(self) + args.num_train_epochs * per_epoch

    def _take_losses(self) -> None:
        """Add the losses since the last call to the next log."""
        if not self._is_in_fit:
            return
        now, before = self._side.sums(), self._sums
        self._sums = now
        if now[1] > before[1]:
            self._run.add_loss(loss=(now[0] - before[0]) / (now[1] - before[1]), weight=now[1] - before[1])

    def _load_checkpoint(self) -> None:
        if not self._resume:
            return
        folder = self._run.args.output_dir
        weights = _newest(folder) if self._resume is True else os.fspath(self._resume)
        state = weights.removesuffix(_WEIGHTS) + _STATE
        if not weights.endswith(_WEIGHTS) or not os.path.isfile(weights) or not os.path.isfile(state):
            raise UsageError(
                f"resume_from_checkpoint={weights!r}: no such file, or no {_STATE} file next to it; pass a "
                f"checkpoint-<step>{_WEIGHTS} that KerasCallbacks has saved"
            )
        self._resume = None  # only once: a second fit goes on from the first
        if not self._side.optimizer.built:
            self._side.optimizer.build(self.model.trainable_variables)
        self.model.load_weights(weights)
        with open(state, encoding="utf-8") as file:
            kept = json.load(file)
        self._run.load_state_dict(from_json(kept["run"]))
        self._side.model._initial_epoch = int(kept["epoch"] or 0)


class _Side:
    """`Framework` of Keras."""

    def __init__(self, owner: KerasCallbacks) -> None:
        self._owner = owner
        self.metrics: dict[str, Any] = {}
        self._warned: set[str] = set()
        self.epoch_begins()

    def epoch_begins(self) -> None:
        self._mean = (0.0, 0)  # Keras's mean loss since the epoch began, and the number of its batches
        self._step_began = (0.0, 0.0)  # `sums` at the end of the last step

    @property
    def model(self) -> Any:
        """Model without a request for JAX's weights, which may be elsewhere."""
        return unwrapped(self._owner._model)

    @property
    def optimizer(self) -> Any:
        return self.model.optimizer

    def context(self, event: str) -> dict[str, Any]:
        model = self.model if event in _IN_STEPS else self._owner.model
        return {"model": model, "optimizer": self.optimizer, "trainer": None}

    def note(self, logs: dict[str, Any], batches: int) -> None:
        """Note Keras's logs after a number of the epoch's batches."""
        self.metrics = logs
        if "loss" in logs:
            self._mean = (logs["loss"], batches)

    def step_loss(self) -> float | None:
        """Return the loss of the step that ends now; None if Keras reports none."""
        # JAX's sums would first have to be copied to the model, in each step.
        now = self._sums_by_batches() if _is_jax() else self.sums()
        before, self._step_began = self._step_began, now
        return (now[0] - before[0]) / (now[1] - before[1]) if now[1] > before[1] else None

    def sums(self) -> tuple[float, float]:
        """Return the sum of the epoch's losses so far, and the sum of their weights."""
        for metric in self._owner.model.metrics:
            if metric.name == "loss" and hasattr(metric, "total") and hasattr(metric, "count"):
                return float(metric.total), float(metric.count)
        return self._sums_by_batches()  # a model with its own train_step may have no such metric

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
            # Each file is renamed when complete. The weights come last, because a checkpoint is found by them.
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
        self._warn("should_epoch_stop", "Keras ends an epoch only with its data; use fit(steps_per_epoch=)")

    def evaluate(self) -> None:
        self._warn("should_evaluate", "Keras evaluates only at the end of epochs; use fit(validation_freq=)")

    def _warn(self, flag: str, why: str) -> None:
        if flag not in self._warned:
            self._warned.add(flag)
            _log.warning("%s ignored: %s", flag, why)


def steps_taken(callback: Any) -> int:
    """Return the number of steps of the optimizer, which on JAX copies its state to the callback's `model`."""
    return int(callback.model.optimizer.iterations)


def _is_jax() -> bool:
    import keras

    return bool(keras.config.backend() == "jax")


def _is_finite(model: Any) -> bool:
    import numpy as np

    return all(bool(np.isfinite(get_weight).all()) for get_weight in model.get_weights())


def _newest(folder: str) -> str:
    """Return the checkpoint of the last step whose weights are finite.

    Raises:
        UsageError: there is none.
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
        _log.warning("%s skipped: its weights are not finite (pass its path to load it anyway)", path)
    raise UsageError(
        f"resume_from_checkpoint=True: {folder} has no checkpoint-<step>{_WEIGHTS}; leave it out to start a new run"
    )


def _state_beside(weights: str) -> Any:
    try:
        with open(weights.removesuffix(_WEIGHTS) + _STATE, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:  # raises where the checkpoint is loaded
        return {}
