"""`AsyncTrainer`: tests a trainer's model beside its next epoch. For loops of no framework."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from ....errors import UsageError
from ...agree import Alone
from ...evaluation.evaluator import AsyncEvaluator, Drain
from ...evaluation.prepared import prepare_for
from ...evaluation.ranks import Evaluations
from ...evaluation.weights import loader_for
from ...frameworks.evaluations import EvaluatorOptions, check_callable, row_of, with_options

if TYPE_CHECKING:
    from ...evaluation import EvaluationRecord

__all__ = ["AsyncTrainer"]

_NEEDED = ("train", "serialized_state_dict", "_epochs", "_metrics")


@with_options(EvaluatorOptions)
class AsyncTrainer:
    """Runs a trainer's epochs, and tests the weights of each while the next one trains.

        AsyncTrainer(trainer, make_model, lambda model: {"loss": score(model)}).run(loader)

    trainer: has `train(loader)`, which trains one epoch; `_epochs`, to be iterated over, or their number; `_metrics`,
        whose `test` (a key of a dictionary, else an attribute) is set to the latest result, before the next epoch
        begins and when all is done; and `serialized_state_dict()`: the weights, as one pickle, as a dictionary of
        pickles, or, with less work for training, as a dictionary of tensors or arrays. Its `_epoch` is set to each of
        `_epochs`, from 0 where that is a number.
    model_factory: makes the architecture; called by a worker.
    test_fn: (model) -> metrics, a dictionary. A torch model is in evaluation mode.
    val_compute: where tests run. None: a thread here; "subprocess"; a pool, a node or role of it; an AdaptiveCompute;
        any Dispatcher.
    drain: "strict" waits for the test of the epoch before; "lazy" does not, and `_metrics.test` may be older.
    cache_key: "auto": a worker keeps the model for this trainer; a name of yours: for all that have the same; None: it
        is made anew each time.
    load: (model, state) -> None puts weights in; None: those of torch, and lists of arrays into Keras's models.
    drain_timeout_s: seconds that the end waits for tests under way; None: no limit.
    max_age_steps: results that come when training is more epochs ahead are too old. None: no limit.
    options: fp16_state_dict, max_pending, on_backpressure, on_error, gate, timeout_s and timeline, as `AsyncEvaluator`
        has them. Tests that fail, are skipped or are too old leave `_metrics.test` as it is.

    `history`: a row for each test: its metrics, `epoch`, `elapsed_secs`, `step` (epochs trained), `snapshot_id`,
    `submitted_at`, `started_at`, `finished_at`, `worker`, `status`; `skipped` True where it was. `records`: the same
    as EvaluationRecords.

    Raises: UsageError for what is not legal.
    """

    __module__ = "skyward.training.sakura"

    def __init__(
        self,
        trainer: Any,
        model_factory: Callable[[], Any],
        test_fn: Callable[[Any], Any],
        val_compute: Any = None,
        *,
        drain: Drain = "strict",
        max_age_steps: int | None = None,
        load: Callable[[Any, Any], object] | None = None,
        drain_timeout_s: float | None = 300.0,
        **options: Unpack[EvaluatorOptions],
    ) -> None:
        missing = [name for name in _NEEDED if not hasattr(trainer, name)]
        if missing:
            raise UsageError(f"trainer: {type(trainer).__name__} has no {', '.join(missing)}, which AsyncTrainer needs")
        check_callable(model_factory=model_factory, test_fn=test_fn)
        self._epochs = _epochs_of(trainer)
        self._trainer, self._factory, self._test_fn = trainer, model_factory, test_fn
        self._drain_timeout_s = drain_timeout_s
        given = {"compute": val_compute, "drain": drain, "max_age_steps": max_age_steps, **options}
        self._options: dict[str, Any] = {**given, "load": Load(load)}
        self._evaluations = Evaluations("AsyncTrainer", row=row_of)
        self.history, self.records = self._evaluations.history, self._evaluations.records

    def run(self, train_loader: Any = None) -> None:
        """Trains all epochs. Gives back when all tests have ended, or `drain_timeout_s` is over.

        Raises: what training raises; what a test raises, with on_error="raise".
        """
        trainer, evaluations, trained = self._trainer, self._evaluations, 0
        evaluations.open(self._evaluator, ranks=Alone())
        try:
            for trained, epoch in enumerate(self._epochs, start=1):
                trainer._epoch = epoch
                trainer.train(train_loader)
                evaluations.submit_state(trainer.serialized_state_dict, step=trained, epoch=epoch)
                self._tell(evaluations.poll(step=trained))
            self._tell(evaluations.drain(step=trained, timeout_s=self._drain_timeout_s))
        finally:
            evaluations.close()

    def _evaluator(self) -> AsyncEvaluator:
        factory = prepare_for(self._options["compute"], self._factory)
        names = {"compute": "val_compute", "eval_fn": "test_fn"}
        return AsyncEvaluator(factory, Tested(self._test_fn), **self._options, name="test", argument_names=names)

    def _tell(self, records: list[EvaluationRecord]) -> None:
        for record in records:
            if record.status == "ok":
                _set_test(self._trainer._metrics, {**record.metrics, "elapsed_secs": record.elapsed_s})


def _epochs_of(trainer: Any) -> Iterable[Any]:
    epochs = trainer._epochs
    if isinstance(epochs, int) and not isinstance(epochs, bool):
        return range(epochs)
    if not isinstance(epochs, Iterable):
        raise UsageError(f"trainer._epochs={epochs!r}: not a number of epochs; give a number, or a range")
    return epochs


def _set_test(metrics: Any, result: dict[str, Any]) -> None:
    if isinstance(metrics, MutableMapping):
        metrics["test"] = result
    else:
        metrics.test = result


@dataclass(frozen=True)
class Tested:
    """A user's `test_fn`, as workers call it."""

    test_fn: Callable[[Any], Any]

    def __call__(self, model: Any, payload: Any) -> Any:
        return self.test_fn(model)


@dataclass(frozen=True)
class Load:
    """Puts what `serialized_state_dict` gave into a model, on the worker."""

    load: Callable[[Any, Any], object] | None

    def __call__(self, model: Any, state: Any) -> None:
        """Raises: as `load_torch`."""
        whole = pickle.loads(state) if isinstance(state, bytes | bytearray) else state
        if isinstance(whole, Mapping):
            whole = {name: pickle.loads(value) if isinstance(value, bytes) else value for name, value in whole.items()}
        (self.load or loader_for(whole))(model, whole)
