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
from typing import TYPE_CHECKING, Any, Literal

from ....errors import UsageError
from ...agree import Alone, Ranks
from ...callbacks.lines import write_line
from ...evaluation.prepared import Prepared
from ..evaluations import Beside, EvaluatorOptions, line_of, row_of_epoch
from ..hf.callbacks import on_the_stack
from ..model import class_at_first_use, load_framework, plain
from .callbacks import KerasTranslation
from .models import KerasFactory, KerasSave, KerasScore, load_keras
from .monitors import KerasMonitors, values_of

if TYPE_CHECKING:
    from ...evaluation import AsyncEvaluator, EvaluationRecord, Timeline
    from ...evaluation.taking import Taken, Taker
    from ...snapshot import SnapshotPool

__all__ = ["SakuraKeras", "SakuraKerasCallback"]

_log = logging.getLogger(__name__)

_FILES = (".weights.h5", ".keras", ".npz")


class SakuraKeras(Beside):
    """What `SakuraKerasCallback` is but for Keras's base class, so that nothing is imported here."""

    _is_missing = "no fit is under way; it is a callback of model.fit"

    model: Any
    params: dict[str, Any] | None

    def __init__(  # noqa: PLR0913  # named as their users know them
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
        drain: Literal["lazy", "strict"] = "strict",
        cache_key: str | None = "auto",
        fp16_state_dict: bool = False,
        max_pending: int = 4,
        on_backpressure: Literal["skip", "queue", "block"] = "skip",
        async_copy: bool = True,
        on_error: Literal["record", "raise"] = "record",
        gate: Literal["auto", "always", "sync"] = "auto",
        timeout_s: float | None = None,
        max_age_steps: int | None = None,
        snapshots: SnapshotPool | None = None,
        timeline: Timeline | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if mode not in ("auto", "min", "max"):
            raise UsageError(f"mode={mode!r}: give 'auto', 'min' or 'max'")
        if isinstance(val_freq, bool) or not isinstance(val_freq, int) or val_freq < 1:
            raise UsageError(f"val_freq={val_freq!r}: it is epochs from one evaluation to the next, >= 1")
        if model_path is not None and not os.fspath(model_path).endswith(_FILES):
            raise UsageError(f"model_path={os.fspath(model_path)!r}: it must end in {', '.join(_FILES)}")
        for field, function in (("model_factory", model_factory), ("val_fn", val_fn)):
            if not callable(function):
                raise UsageError(f"{field}={function!r}: it cannot be called; give a function")
        options = EvaluatorOptions(
            val_compute=val_compute,
            drain=drain,
            cache_key=cache_key,
            fp16_state_dict=fp16_state_dict,
            max_pending=max_pending,
            on_backpressure=on_backpressure,
            async_copy=async_copy,
            on_error=on_error,
            gate=gate,
            timeout_s=timeout_s,
            snapshots=snapshots,
            timeline=timeline,
        )
        super().__init__(options, max_age_steps=max_age_steps, ranks=ranks)
        self._factory, self._score = model_factory, KerasScore(val_fn)
        self._payload, self._verbose, self._val_freq = val_payload, verbose, val_freq
        self._model_path, self._monitor, self._mode = model_path, monitor, mode
        self._ranks: Ranks = Alone()
        self._callbacks: list[Any] = []
        self._monitors = KerasMonitors([], None)
        self._taker: Taker | None = None
        self._kept: dict[int, Taken] = {}  # by epoch: what is to be known again when the score comes
        self._logs: dict[int, dict[str, Any]] = {}  # of epochs whose evaluation is open
        self._values: dict[int, dict[str, Any]] = {}  # what evaluations of this fit gave, by epoch
        self._is_evaluated_twice = False
        self._is_in_fit = False
        self.best_val_loss: float | None = None

    # Keras's events --------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        self.close()  # of a fit that raised
        self._find_callbacks()
        self._values, self._is_in_fit = {}, True
        self._ranks = self._ranks_of_run()
        self._open(self._evaluator, self._ranks)
        self._monitors = KerasMonitors(self._callbacks, self.model)
        self._monitors.attach()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        step = self._steps_taken()
        if (epoch + 1) % self._val_freq == 0:
            self._logs[epoch] = dict(logs or {})
            self._submit(epoch, step)
        for record in self._met.poll(step=step):
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
        for record in self._met.drain(step=self._steps_taken()):
            self._report(record)
        self._align()
        self._warn_of_monitors()
        self.close()

    # A user's --------------------------------------------------------------------------------------------------------

    @property
    def model_path(self) -> str | None:
        """The file with the best weights that were scored; None without `model_path`."""
        return None if self._model_path is None else os.fspath(self._model_path)

    def close(self) -> None:
        """For a fit that raised, after which Keras calls nothing: ends what is under way. Idempotent."""
        self._monitors.detach()
        super().close()
        for snapshot in self._kept.values():
            snapshot.release()
        self._kept, self._logs, self._is_in_fit = {}, {}, False

    # Within ----------------------------------------------------------------------------------------------------------

    def _find_callbacks(self) -> None:
        import keras

        found = on_the_stack(keras.callbacks.CallbackList)
        self._callbacks = [] if found is None else found.callbacks
        if not any(each is self for each in self._callbacks):
            _log.warning(
                "SakuraKerasCallback was not called by fit: what evaluations give reaches no other callback, but is "
                "in its own history"
            )
            return
        self._callbacks.remove(self)
        self._callbacks.insert(0, self)

    def _evaluator(self) -> AsyncEvaluator:
        from ...evaluation import BestModel

        make = KerasFactory(self._factory, getattr(self.model, "input_shape", None))
        factory = Prepared(make)
        if self._options.is_here:
            factory.prepare()
        best = None
        if self._model_path is not None:
            saver = Prepared(make)
            saver.prepare()
            best = BestModel(
                self._model_path,
                self._monitor,
                greater_is_better={"min": False, "max": True}.get(self._mode),
                save=KerasSave(saver()),
            )
        return self._options.evaluator(
            factory,
            self._score,
            self._payload,
            load=load_keras,
            best=best,
            argument_names={"eval_fn": "val_fn", "payload": "val_payload"},
        )

    def _steps_taken(self) -> int:
        return int(self.model.optimizer.iterations)  # `model`: JAX's are brought back to it

    def _submit(self, epoch: int, step: int) -> None:
        model = self.model
        is_kept = self._monitors.needs_weights

        def state() -> Any:  # not called where the evaluation is skipped
            return self._keep(epoch, model) if is_kept else values_of(model)

        if is_kept and self._ranks.rank > 0:
            self._keep(epoch, model)
        self._met.submit_state(state, step=step, epoch=epoch)

    def _keep(self, epoch: int, model: Any) -> Taken:
        """A snapshot that is here, too, when the score comes."""
        self._kept[epoch] = self._take(values_of(model))
        return self._kept[epoch]

    def _take(self, values: list[Any]) -> Taken:
        if self._taker is None:
            from ...evaluation.taking import Taker

            self._taker = Taker(self._options.snapshots, keep=self._options.max_pending)
        return self._taker.take(values, waits=not self._options.async_copy)

    def _report(self, record: EvaluationRecord, *, epoch: int | None = None, logs: Any = None) -> None:
        """epoch, logs: of the one that ends, if one does."""
        at = int(record.epoch or 0)
        snapshot, before = self._kept.pop(at, None), self._logs.pop(at, {})
        try:
            self.records.append(record)
            self.history.append(row_of_epoch(record))
            if self._verbose and self._ranks.rank == 0:
                write_line(_line(record))
            if record.status not in ("ok", "late"):
                return
            named = {_val_name(name): plain(value) for name, value in record.metrics.items()}
            self._values[at] = named
            self._tell_loggers(record, at, named)
            if record.status != "ok":
                return
            self._note_best(named)
            if at == epoch and logs is not None:
                logs.update(named)  # known before the others hear of this epoch's end: they see it there
            else:
                self._monitors.told(at, {**before, **named}, None if snapshot is None else snapshot.state)
        finally:
            if snapshot is not None:
                snapshot.release()

    def _tell_loggers(self, record: EvaluationRecord, epoch: int, named: dict[str, Any]) -> None:
        import keras

        for each in self._callbacks:
            if isinstance(each, KerasTranslation):
                each.evaluated_beside(named, step=record.step, epoch=epoch + 1.0)
            elif isinstance(each, keras.callbacks.TensorBoard):
                with each._val_writer.as_default():
                    for name, value in named.items():
                        if isinstance(value, int | float):
                            each.summary.scalar(f"epoch_{name.removeprefix('val_')}", value, step=epoch)

    def _note_best(self, named: dict[str, Any]) -> None:
        from ...evaluation.best import is_greater_better

        value = named.get(self._monitor)
        if not isinstance(value, int | float) or math.isnan(value):
            return
        is_greater = is_greater_better(self._monitor) if self._mode == "auto" else self._mode == "max"
        if self.best_val_loss is None or (value > self.best_val_loss if is_greater else value < self.best_val_loss):
            self.best_val_loss = value

    def _align(self) -> None:
        """Keras's History has one value for each of its epochs."""
        import keras

        names = {name for values in self._values.values() for name in values}
        for each in self._callbacks:
            if isinstance(each, keras.callbacks.History) and not self._is_evaluated_twice:
                for name in sorted(names):
                    each.history[name] = [self._values.get(at, {}).get(name, math.nan) for at in each.epoch]

    def _warn_of_monitors(self) -> None:
        given = sorted({name for values in self._values.values() for name in values})
        for name, who in self._monitors.waits_for.items():
            if given and name not in given:
                _log.warning("%s monitors %r, which val_fn did not give: it gave %s", who, name, ", ".join(given))


def _val_name(name: str) -> str:
    return name if name.startswith("val_") else f"val_{name.removeprefix('eval_')}"


def _line(record: EvaluationRecord) -> str:
    """Epochs from 1, as Keras prints them."""
    epoch = f"Epoch {int(record.epoch or 0) + 1}"
    if record.status in ("skipped", "failed"):
        return f"{epoch}: evaluation {record.status}: {record.error}"
    return line_of(record, epoch, {_val_name(name): plain(value) for name, value in record.metrics.items()})


SAKURAKERASCALLBACK_DOC = """A callback of Keras's `fit` that evaluates beside training, at the end of each epoch.

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
    cache_key: "auto": a worker keeps the model for this fit's evaluations; a name of yours: for all that have the
        same; None: it is made anew each time.
    fp16_state_dict: float32 weights travel as float16, and are cast back.
    max_pending: evaluations under way at once, at least 1: each holds a copy of the weights.
    on_backpressure: when there are max_pending, or val_compute has too much to do: "skip" leaves the evaluation out,
        which the history says; "block" waits for the oldest; "queue" does so only when there are max_pending.
    async_copy: on CUDA, with torch, the copy to the host is not waited for.
    on_error: "record": evaluations that fail say so in the history; "raise": they end training.
    gate: "auto" begins beside training, tries evaluations between its steps when that is cheap, and keeps the faster;
        "always" never tries; "sync" evaluates while training waits.
    timeout_s: seconds that an evaluation may run. max_age_steps: results that come when training is more optimizer
        steps ahead are "late": logged, but they decide nothing. None: no limit.
    snapshots: buffers of the copies of torch's tensors, to share with others. timeline: gets what took how long.
    ranks: of the run; None: those of torch's process group. On other backends give them where there are several.

    `history`: a row for each evaluation: its metrics, `epoch` (the first is 0), `elapsed_secs` (of the evaluation
    alone), `worker_name`, `step`, `snapshot_id`, `submitted_at`, `started_at`, `finished_at`, `worker`, `status`;
    `skipped` True where it was. `records`: the same as EvaluationRecords. `best_val_loss`: None until there is one.

    Raises: UsageError for what is not legal; in fit, ArgumentNotPicklable when a factory or payload cannot travel.
    """

if TYPE_CHECKING:
    from keras.callbacks import Callback as _Callback

    class SakuraKerasCallback(SakuraKeras, _Callback):  # type: ignore[misc]  # its base is Any to mypy here
        __doc__ = SAKURAKERASCALLBACK_DOC

else:
    __getattr__ = class_at_first_use(
        __name__,
        "SakuraKerasCallback",
        SAKURAKERASCALLBACK_DOC,
        lambda: (SakuraKeras, load_framework("keras", extra="keras").callbacks.Callback),
    )
