"""`AsyncTrainer`: tests a model asynchronously while its next epoch trains, for loops without a framework."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from ....errors import UsageError
from ...agree import Alone
from ...evaluation.evaluator import AsyncEvaluator
from ...evaluation.pace import Drain
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
    """Run a trainer's epochs, and test the weights of each one while the next one trains.

    The trainer is an object of your own with these members:

    - `train(loader)` trains one epoch.
    - `_epochs` is an iterable of epochs, or their number. `_epoch` is set to each of them, from 0 for a number.
    - `_metrics` receives the latest result as `test`: a key if it is a dict, else an attribute. It is set before the
      next epoch begins and at the end. A test that fails, is skipped or is too old does not change it.
    - `serialized_state_dict()` returns the weights: a dict of tensors or arrays (fastest), a dict of pickles, or one
      pickle.

    Args:
        trainer: the trainer.
        model_factory: makes the model's architecture; workers call it.
        test_fn: `(model) -> metrics`, a dict. A torch model is in eval mode.
        val_compute: place of the tests. None: a thread of this process; "subprocess"; a pool, one of its nodes or
            roles; an AdaptiveCompute; or any Dispatcher.
        drain: "strict" waits for the test of the epoch before. "lazy" does not, so `_metrics.test` may be older.
        max_age_steps: epochs that training may be ahead of a result before it is too old; None: no limit.
        load: `(model, state) -> None` loads the weights. None: load torch state dicts, and lists of arrays into Keras
            models.
        drain_timeout_s: seconds to wait for open tests at the end; None: no limit.
        **options: as for `AsyncEvaluator`: cache_key, fp16_state_dict, max_pending, on_backpressure, on_error, gate,
            timeout_s and timeline. With cache_key="auto" workers keep the model for this trainer.

    Attributes:
        history: a row for each test: its metrics, `epoch`, `elapsed_secs`, `step` (epochs trained), `snapshot_id`,
            `submitted_at`, `started_at`, `finished_at`, `worker` and `status`. `skipped` is True for a skipped one.
        records: the same as `EvaluationRecord` objects.

    Raises:
        UsageError: the trainer lacks a member, or a value is not legal.

    Example:
        Test each epoch's weights while the next one trains::

            sakura = AsyncTrainer(trainer, make_model, lambda model: {"loss": score(model)})
            sakura.run(loader)
            print(sakura.history[-1]["loss"])
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
            raise UsageError(
                f"trainer: {type(trainer).__name__} has no {', '.join(missing)}, which AsyncTrainer needs; define "
                "train, serialized_state_dict, _epochs and _metrics"
            )
        check_callable(model_factory=model_factory, test_fn=test_fn)
        self._epochs = _epochs_of(trainer)
        self._trainer, self._factory, self._test_fn = trainer, model_factory, test_fn
        self._drain_timeout_s = drain_timeout_s
        self._options: dict[str, Any] = {
            "compute": val_compute,
            "drain": drain,
            "max_age_steps": max_age_steps,
            **options,
            "load": Load(load),
        }
        self._evaluations = Evaluations("AsyncTrainer", row=row_of)
        self.history, self.records = self._evaluations.history, self._evaluations.records

    def run(self, train_loader: Any = None) -> None:
        """Train all epochs. Return when all tests have ended, or after `drain_timeout_s`.

        Args:
            train_loader: passed to the trainer's `train`.

        Raises:
            Exception: training raised it; with on_error="raise" also a test.
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
        raise UsageError(f"trainer._epochs={epochs!r}: must be a whole number or an iterable; set a number of epochs")
    return epochs


def _set_test(metrics: Any, result: dict[str, Any]) -> None:
    if isinstance(metrics, MutableMapping):
        metrics["test"] = result
    else:
        metrics.test = result


@dataclass(frozen=True)
class Tested:
    """Adapter of a `test_fn` for workers, which also pass a payload."""

    test_fn: Callable[[Any], Any]

    def __call__(self, model: Any, payload: Any) -> Any:
        return self.test_fn(model)


@dataclass(frozen=True)
class Load:
    """Loader of a `serialized_state_dict` into a model, on the worker."""

    load: Callable[[Any, Any], object] | None

    def __call__(self, model: Any, state: Any) -> None:
        """Load a state; raises as `load_torch` does."""
        whole = pickle.loads(state) if isinstance(state, bytes | bytearray) else state
        if isinstance(whole, Mapping):
            whole = {name: pickle.loads(value) if isinstance(value, bytes) else value for name, value in whole.items()}
        (self.load or loader_for(whole))(model, whole)
