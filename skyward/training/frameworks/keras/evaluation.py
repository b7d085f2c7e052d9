"""`SakuraKerasCallback`: asynchronous evaluation for Keras 3's `fit`, on any backend.

    model.fit(x, y, epochs=20, callbacks=[
        SakuraKerasCallback(model_factory=make, val_fn=score, val_payload=(x_val, y_val)),
        keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
    ])

It replaces `validation_data=`, for which training would wait:

- Logs: `model.history.history` has the metrics at the evaluated epoch, named `val_...`, NaN where there are none.
  TensorBoard has them too. Callbacks in `KerasCallbacks` receive `on_evaluate` with a state of the evaluated step. A
  CSVLogger cannot change an earlier row; use `history` instead.
- Decisions: `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint(save_best_only=True)` act once for each result
  (see `monitors`). The model has the scored weights while a callback that keeps weights acts.
- Order: the callback moves itself to the front of fit's callbacks, so that the others find all results at the end.
- JAX: the model has a step's weights only at the end of an epoch, which is when they are copied.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Unpack

from ....errors import UsageError
from ...agree import Ranks
from ...evaluation.best import BestModel, BestValue, is_greater_better
from ...evaluation.evaluator import MAX_PENDING, AsyncEvaluator
from ...evaluation.model_copy import ModelCopier
from ...evaluation.pace import Drain
from ...evaluation.prepared import Prepared, prepare_for
from ...evaluation.ranks import Evaluations
from ..evaluations import RunOptions, check_callable, line_of, row_of_epoch, with_options
from ..foreign import load_framework, named, on_the_stack
from .callbacks import KerasCallbacks, steps_taken
from .models import KerasFactory, KerasSave, KerasScore, load_keras, values_of
from .monitors import KerasMonitors

if TYPE_CHECKING:
    from keras import callbacks as kinds

    from ...evaluation import EvaluationRecord
    from ...evaluation.model_copy import ModelCopy
else:
    kinds = load_framework("keras", extra="keras").callbacks

_log = logging.getLogger(__name__)

_FILES = (".weights.h5", ".keras", ".npz")


@with_options(RunOptions)
class SakuraKerasCallback(kinds.Callback):  # type: ignore[misc]  # its base is Any to mypy here
    """Callback of Keras's `fit` that evaluates asynchronously, at the end of each epoch.

    Args:
        model_factory: makes the architecture that is trained; workers call it. It must compile the model if `val_fn`
            calls `evaluate`. A model without `keras.Input` is built with the input shape of the trained model.
        val_fn: `(model, val_payload) -> metrics`, a dict, such as `model.evaluate(..., return_dict=True)`. Workers call
            it.
        val_payload: data of `val_fn`, such as arrays; sent to each worker once. Do not change it afterwards.
        val_compute: place of the evaluations. None: a thread of this process; "subprocess"; a pool, one of its nodes
            or roles; an AdaptiveCompute; or any Dispatcher. Workers need Keras with any backend.
        verbose: print a line for each result.
        model_path: file for the weights with the best `monitor`: `.keras`, `.weights.h5` or `.npz` (arrays by number,
            as `get_weights` returns them). Its record is in `<model_path>.json`. None: no file.
        monitor: metric that decides about `best_val_loss` and `model_path`.
        mode: "min", "max", or "auto": greater is better unless the name contains loss or error.
        val_freq: epochs between two evaluations, at least 1.
        drain: "strict" waits, at the end of an epoch, for the evaluation of the epoch before; "lazy" does not.
        max_age_steps: optimizer steps that training may be ahead of a result. An older result is "late": it is logged,
            but does not change training. None: no limit.
        ranks: ranks of the run; None: those of torch's process group. On other backends pass them if there are several.
        **options: as for `AsyncEvaluator`: cache_key, fp16_state_dict, max_pending, on_backpressure, on_error, gate,
            timeout_s, timeline, async_copy and snapshots; the last two are for torch tensors. With cache_key="auto"
            workers keep the model for the evaluations of this fit.

    Attributes:
        history: a row for each evaluation: its metrics, `epoch` (from 0), `elapsed_secs` (of the evaluation alone),
            `worker_name`, `step`, `snapshot_id`, `submitted_at`, `started_at`, `finished_at`, `worker` and `status`.
            `skipped` is True for a skipped one.
        records: the same as `EvaluationRecord` objects.

    Raises:
        UsageError: a value is not legal.
        ArgumentNotPicklable: in `fit`: a factory or payload cannot be sent to a worker.

    Example:
        Evaluate each epoch in a subprocess, and stop early by the result::

            evaluation = SakuraKerasCallback(make_model, score, (x_test, y_test), val_compute="subprocess")
            stopping = keras.callbacks.EarlyStopping("val_loss", patience=3)
            model.fit(x, y, epochs=20, callbacks=[evaluation, stopping])
            print(evaluation.best_val_loss)
    """

    __module__ = "skyward.training.sakura"

    model: Any
    params: dict[str, Any] | None

    def __init__(
        self,
        model_factory: Callable[[], Any],
        val_fn: Callable[[Any, Any], Any],
        val_payload: Any = None,
        val_compute: Any = None,
        verbose: bool = True,
        *,
        model_path: str | os.PathLike[str] | None = None,
        monitor: str = "val_loss",
        mode: Literal["auto", "min", "max"] = "auto",
        val_freq: int = 1,
        drain: Drain = "strict",
        max_age_steps: int | None = None,
        ranks: Ranks | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        super().__init__()
        if mode not in ("auto", "min", "max"):
            raise UsageError(f"mode={mode!r}: must be 'auto', 'min' or 'max'; set mode='auto' (the default)")
        if isinstance(val_freq, bool) or not isinstance(val_freq, int) or val_freq < 1:
            raise UsageError(
                f"val_freq={val_freq!r}: must be a whole number of epochs >= 1; set val_freq=1 (the default)"
            )
        if model_path is not None and not os.fspath(model_path).endswith(_FILES):
            raise UsageError(
                f"model_path={os.fspath(model_path)!r}: unknown format; use a name that ends in {', '.join(_FILES)}"
            )
        check_callable(model_factory=model_factory, val_fn=val_fn)
        self._factory, self._parts, self._ranks = model_factory, (KerasScore(val_fn), val_payload), ranks
        self._options = {"compute": val_compute, "drain": drain, "load": load_keras, **options}
        self._taker = ModelCopier(options.get("snapshots"), keep=options.get("max_pending", MAX_PENDING))
        self._takes_at_once = not options.get("async_copy", True)
        self._evaluations = Evaluations(
            type(self).__name__,
            missing="no fit is running; pass it to model.fit(callbacks=[...])",
            max_age_steps=max_age_steps,
            row=row_of_epoch,
            line=_line if verbose else None,
        )
        self.history, self.records = self._evaluations.history, self._evaluations.records
        self._val_freq, self._model_path = val_freq, model_path
        self._best = BestValue(monitor, is_greater=is_greater_better(monitor) if mode == "auto" else mode == "max")
        self._callbacks: list[Any] = []
        self._monitors = KerasMonitors([], None)
        self._kept: dict[int, ModelCopy] = {}  # by epoch: weights that a monitor needs when the score comes
        self._logs: dict[int, dict[str, Any]] = {}  # by epoch, of open evaluations
        self._values: dict[int, dict[str, Any]] = {}  # metrics of this fit's evaluations, by epoch
        self._is_evaluated_twice = False
        self._is_in_fit = False

    # Keras's events --------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        self.close()  # a fit that raised may have left evaluations open
        self._find_callbacks()
        self._values, self._is_in_fit = {}, True
        self._evaluations.open(self._evaluator, ranks=self._ranks)
        self._monitors = KerasMonitors(self._callbacks, self.model)
        self._monitors.attach()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        step = steps_taken(self)
        if (epoch + 1) % self._val_freq == 0:
            self._logs[epoch] = dict(logs or {})
            self._submit(epoch, step)
        for record in self._evaluations.poll(step=step):
            self._report(record, epoch=epoch, logs=logs)
        self._align()

    def on_test_begin(self, logs: Any = None) -> None:
        if self._is_in_fit and not self._is_evaluated_twice:
            self._is_evaluated_twice = True
            _log.warning(
                "fit(validation_data=...) makes Keras evaluate too, while training waits; leave it out to use the "
                "asynchronous val_... metrics"
            )

    def on_train_end(self, logs: Any = None) -> None:
        for record in self._evaluations.drain(step=steps_taken(self)):
            self._report(record)
        self._align()
        self._warn_of_monitors()
        self.close()

    # A user's --------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Number of evaluations without a reported result."""
        return self._evaluations.pending

    @property
    def best_val_loss(self) -> float | None:
        """Best value of `monitor`; None before the first result."""
        return self._best.value

    @property
    def model_path(self) -> str | None:
        """File with the best weights; None without `model_path`."""
        return None if self._model_path is None else os.fspath(self._model_path)

    def close(self) -> None:
        """Cancel open evaluations after a fit that raised, of which Keras does not notify callbacks. Idempotent."""
        self._monitors.detach()
        self._evaluations.close()
        for snapshot in self._kept.values():
            snapshot.release()
        self._kept, self._logs, self._is_in_fit = {}, {}, False

    # Within ----------------------------------------------------------------------------------------------------------

    def _find_callbacks(self) -> None:
        callback_list = on_the_stack(kinds.CallbackList)
        self._callbacks = [] if callback_list is None else callback_list.callbacks
        if not any(callback is self for callback in self._callbacks):
            _log.warning(
                "SakuraKerasCallback was not called by fit: results are in its own history, but reach no other callback"
            )
            return
        self._callbacks.remove(self)
        self._callbacks.insert(0, self)

    def _evaluator(self) -> AsyncEvaluator:
        make = KerasFactory(self._factory, getattr(self.model, "input_shape", None))
        factory = prepare_for(self._options["compute"], make)
        best = None
        if self._model_path is not None:
            saver = Prepared(make)
            saver.prepare()
            metric, is_greater = self._best.metric, self._best.is_greater
            best = BestModel(self._model_path, metric, greater_is_better=is_greater, save=KerasSave(saver()))
        names = {"compute": "val_compute", "eval_fn": "val_fn", "payload": "val_payload"}
        return AsyncEvaluator(factory, *self._parts, **self._options, best=best, argument_names=names)

    def _submit(self, epoch: int, step: int) -> None:
        model = self.model
        is_kept = self._monitors.needs_weights

        def state() -> Any:  # not called if the evaluation is skipped
            return self._keep(epoch, model) if is_kept else values_of(model)

        if is_kept and self._evaluations.ranks.rank > 0:
            self._keep(epoch, model)
        self._evaluations.submit_state(state, step=step, epoch=epoch)

    def _keep(self, epoch: int, model: Any) -> ModelCopy:
        """Take a snapshot, and keep it until the score comes."""
        self._kept[epoch] = self._taker.take(values_of(model), waits=self._takes_at_once)
        return self._kept[epoch]

    def _report(self, record: EvaluationRecord, *, epoch: int | None = None, logs: Any = None) -> None:
        """Report a result to loggers and monitors; `epoch` and `logs` are those of the epoch that ends, if one does."""
        at = int(record.epoch or 0)
        snapshot, before = self._kept.pop(at, None), self._logs.pop(at, {})
        try:
            if record.status not in ("ok", "late"):
                return
            metrics = self._values[at] = named(record.metrics, "val_", instead_of=("eval_",))
            self._tell_loggers(record, at, metrics)
            if record.status != "ok":
                return
            self._best.note(metrics)
            if at == epoch and logs is not None:
                logs.update(metrics)  # this callback is the first one, so the others see the metrics in their logs
            else:
                self._monitors.pass_result(at, {**before, **metrics}, None if snapshot is None else snapshot.state)
        finally:
            if snapshot is not None:
                snapshot.release()

    def _tell_loggers(self, record: EvaluationRecord, epoch: int, metrics: dict[str, Any]) -> None:
        for callback in self._callbacks:
            if isinstance(callback, KerasCallbacks):
                callback.evaluated_beside(metrics, step=record.step, epoch=epoch + 1.0)
            elif isinstance(callback, kinds.TensorBoard):
                with callback._val_writer.as_default():
                    for name, value in metrics.items():
                        if isinstance(value, int | float):
                            callback.summary.scalar(f"epoch_{name.removeprefix('val_')}", value, step=epoch)

    def _align(self) -> None:
        """Set the metrics in Keras's History, which has one value for each epoch."""
        names = {name for values in self._values.values() for name in values}
        for callback in self._callbacks:
            if isinstance(callback, kinds.History) and not self._is_evaluated_twice:
                for name in sorted(names):
                    callback.history[name] = [self._values.get(at, {}).get(name, math.nan) for at in callback.epoch]

    def _warn_of_monitors(self) -> None:
        names = sorted({name for values in self._values.values() for name in values})
        for name, who in self._monitors.waits_for.items():
            if names and name not in names:
                _log.warning("%s monitors %r, but val_fn returned only %s", who, name, ", ".join(names))


def _line(record: EvaluationRecord) -> str:
    """Make a line for standard output, with epochs from 1 as Keras prints them."""
    epoch = f"Epoch {int(record.epoch or 0) + 1}"
    if record.status in ("skipped", "failed"):
        return f"{epoch}: evaluation {record.status}: {record.error}"
    return line_of(record, epoch, named(record.metrics, "val_", instead_of=("eval_",)))
