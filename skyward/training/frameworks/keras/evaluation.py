"""`SakuraKerasCallback`: evaluations beside Keras 3's `fit`, on any of its backends.

    model.fit(x, y, epochs=20, callbacks=[
        SakuraKerasCallback(model_factory=make, val_fn=score, val_payload=(x_val, y_val)),
        keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
    ])

in place of `validation_data=`, for which training would wait. What Keras's own validation does, and what is done here:

- Logs: `model.history.history` has the metrics at the epoch that was evaluated, named `val_...`, NaN where there are
  none. So has TensorBoard, and callbacks of ours in `KerasCallbacks` hear of them by `on_evaluate`, with a state that
  says the evaluated step. A CSVLogger cannot go back to an earlier row: use `history`.
- Decisions: `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint(save_best_only=True)` act once for each result
  (see `keras_monitors`); for those that keep weights, the model has those that were scored meanwhile.
- Order: the callback moves itself to the front of fit's callbacks, for when training ends they must find all results.
- JAX: a step's weights are in the model at the end of an epoch only, which is when they are taken.
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
from ...evaluation.evaluator import MAX_PENDING, AsyncEvaluator, Drain
from ...evaluation.model_copy import ModelCopier
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

__all__ = ["SakuraKerasCallback"]

_log = logging.getLogger(__name__)

_FILES = (".weights.h5", ".keras", ".npz")


@with_options(RunOptions)
class SakuraKerasCallback(kinds.Callback):  # type: ignore[misc]  # its base is Any to mypy here
    """A callback of Keras's `fit` that evaluates beside training, at the end of each epoch.

    model_factory: makes the architecture that is trained; called by a worker. Compiled, where val_fn calls `evaluate`.
        A model without `keras.Input` is built for the inputs of the model that trains.
    val_fn: (model, val_payload) -> metrics, a dictionary, such as `model.evaluate(..., return_dict=True)`. Called by a
        worker.
    val_payload: what it needs, such as arrays; sent to a worker once. Not to be changed.
    val_compute: where evaluations run. None: a thread here; "subprocess"; a pool, a node or role of it; an
        AdaptiveCompute; any Dispatcher. Elsewhere Keras must have a backend there, not necessarily the same.
    verbose: a line on standard output for each result.
    model_path: gets the weights that were scored best by `monitor`: `.keras`, `.weights.h5` or `.npz` (arrays by
        number, as get_weights gives them). The record is beside it, in `<model_path>.json`.
    monitor, mode: of best_val_loss and model_path; "auto": greater is better, unless the name says loss or error.
    val_freq: epochs from one evaluation to the next.
    drain: "strict" waits, at the end of an epoch, for the evaluation of the one before; "lazy" does not.
    max_age_steps: results that come when training is more optimizer steps ahead are "late": logged, but they decide
        nothing. None: no limit.
    ranks: of the run; None: those of torch's process group. On other backends give them where there are several.
    options: cache_key, fp16_state_dict, max_pending, on_backpressure, on_error, gate, timeout_s, timeline, async_copy
        and snapshots, as `AsyncEvaluator` has them; the last two are for torch's tensors. cache_key="auto": a worker
        keeps the model for this fit's evaluations.

    `history`: a row for each evaluation: its metrics, `epoch` (the first is 0), `elapsed_secs` (of the evaluation
    alone), `worker_name`, `step`, `snapshot_id`, `submitted_at`, `started_at`, `finished_at`, `worker`, `status`;
    `skipped` True where it was. `records`: the same as EvaluationRecords. `best_val_loss`: None until there is one.

    Raises: UsageError for what is not legal; in fit, ArgumentNotPicklable when a factory or payload cannot travel.
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
            raise UsageError(f"mode={mode!r}: give 'auto', 'min' or 'max'")
        if isinstance(val_freq, bool) or not isinstance(val_freq, int) or val_freq < 1:
            raise UsageError(f"val_freq={val_freq!r}: it is epochs from one evaluation to the next, >= 1")
        if model_path is not None and not os.fspath(model_path).endswith(_FILES):
            raise UsageError(f"model_path={os.fspath(model_path)!r}: it must end in {', '.join(_FILES)}")
        check_callable(model_factory=model_factory, val_fn=val_fn)
        self._factory, self._parts, self._ranks = model_factory, (KerasScore(val_fn), val_payload), ranks
        self._options = {"compute": val_compute, "drain": drain, "load": load_keras, **options}
        self._taker = ModelCopier(options.get("snapshots"), keep=options.get("max_pending", MAX_PENDING))
        self._takes_at_once = not options.get("async_copy", True)
        self._evaluations = Evaluations(
            type(self).__name__,
            missing="no fit is under way; it is a callback of model.fit",
            max_age_steps=max_age_steps,
            row=row_of_epoch,
            line=_line if verbose else None,
        )
        self.history, self.records = self._evaluations.history, self._evaluations.records
        self._val_freq, self._model_path = val_freq, model_path
        self._best = BestValue(monitor, is_greater=is_greater_better(monitor) if mode == "auto" else mode == "max")
        self._callbacks: list[Any] = []
        self._monitors = KerasMonitors([], None)
        self._kept: dict[int, ModelCopy] = {}  # by epoch: what is to be known again when the score comes
        self._logs: dict[int, dict[str, Any]] = {}  # of epochs whose evaluation is open
        self._values: dict[int, dict[str, Any]] = {}  # what evaluations of this fit gave, by epoch
        self._is_evaluated_twice = False
        self._is_in_fit = False

    # Keras's events --------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        self.close()  # of a fit that raised
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
                "fit was given validation_data, which Keras evaluates, too, while training waits; leave it out, and "
                "val_... are those from beside training"
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
        """Evaluations that have been asked for, and not been told of yet."""
        return self._evaluations.pending

    @property
    def best_val_loss(self) -> float | None:
        """The best value of `monitor`; None until there is one."""
        return self._best.value

    @property
    def model_path(self) -> str | None:
        """The file with the best weights that were scored; None without `model_path`."""
        return None if self._model_path is None else os.fspath(self._model_path)

    def close(self) -> None:
        """For a fit that raised, after which Keras calls nothing: ends what is under way. Idempotent."""
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
                "SakuraKerasCallback was not called by fit: what evaluations give reaches no other callback, but is "
                "in its own history"
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

        def state() -> Any:  # not called where the evaluation is skipped
            return self._keep(epoch, model) if is_kept else values_of(model)

        if is_kept and self._evaluations.ranks.rank > 0:
            self._keep(epoch, model)
        self._evaluations.submit_state(state, step=step, epoch=epoch)

    def _keep(self, epoch: int, model: Any) -> ModelCopy:
        """A snapshot that is here, too, when the score comes."""
        self._kept[epoch] = self._taker.take(values_of(model), waits=self._takes_at_once)
        return self._kept[epoch]

    def _report(self, record: EvaluationRecord, *, epoch: int | None = None, logs: Any = None) -> None:
        """epoch, logs: of the one that ends, if one does."""
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
                logs.update(metrics)  # known before the others hear of this epoch's end: they see it there
            else:
                self._monitors.told(at, {**before, **metrics}, None if snapshot is None else snapshot.state)
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
        """Keras's History has one value for each of its epochs."""
        names = {name for values in self._values.values() for name in values}
        for callback in self._callbacks:
            if isinstance(callback, kinds.History) and not self._is_evaluated_twice:
                for name in sorted(names):
                    callback.history[name] = [self._values.get(at, {}).get(name, math.nan) for at in callback.epoch]

    def _warn_of_monitors(self) -> None:
        given = sorted({name for values in self._values.values() for name in values})
        for name, who in self._monitors.waits_for.items():
            if given and name not in given:
                _log.warning("%s monitors %r, which val_fn did not give: it gave %s", who, name, ", ".join(given))


def _line(record: EvaluationRecord) -> str:
    """Epochs from 1, as Keras prints them."""
    epoch = f"Epoch {int(record.epoch or 0) + 1}"
    if record.status in ("skipped", "failed"):
        return f"{epoch}: evaluation {record.status}: {record.error}"
    return line_of(record, epoch, named(record.metrics, "val_", instead_of=("eval_",)))
