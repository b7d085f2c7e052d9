"""PyTorch training loop that fires every event, keeps its ranks in step, and resumes bit for bit.

Names, defaults, cadence and the order of events are those of Hugging Face's Trainer, which is not imported. A `Trainer`
consists of a `TrainerRun` (progress and events), an `Objective` (the loss), an `Evaluator` and a `Saver`. `train`
combines them in a `TrainingLoop`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..agree import Ranks
from ..arguments import TrainingArguments
from ..bus import CallbackHandler
from ..checkpoint import Checkpoints
from ..checkpoint.rng import seed_everything
from ..events import TrainerControl, TrainerState
from ..parts import unwrapped
from . import loss
from .batches import MicroBatch
from .collate import Collator, Inputs, columns_of
from .components import Checkpointed
from .data_sources import check_datasets
from .evaluation import Evaluated, Evaluator, loss_in, outputs_without_loss
from .loop import TrainingLoop
from .loss import Objective
from .optimization import Scheduler, make_optimizer, make_scheduler
from .outputs import EvalPrediction, PredictionOutput, TrainOutput
from .precision import Precision, make_deterministic
from .run import TrainerRun, with_defaults
from .saver import Saver
from .stream import Stream, make_stream
from .world import (
    accumulating,
    check_data_parallel,
    checkpoint_activations,
    device_of,
    place,
    ranks_of_environment,
    wrap,
)


class Trainer(Checkpointed):
    """Train, evaluate and predict with one model, in one process or as one rank of torch's process group.

    With several ranks, all of them construct it and call its methods in the same order. Not thread-safe.

    Args:
        model: a module that returns its loss: as "loss", first, or alone, a scalar. With `compute_loss_func` it may
            return anything. With several ranks it is wrapped in DistributedDataParallel, unless it is already wrapped
            or sharded by `fully_shard`.
        args: settings; None: `TrainingArguments()`.
        data_collator: makes a batch of a list of rows. None: stack tensors and lists of numbers.
        train_dataset: an object with `len` and indices, an iterable, or a DataLoader.
        eval_dataset: as `train_dataset`, or a dict of several by name.
        processing_class: a tokenizer or processor; only passed on to callbacks.
        model_init: makes the model after the seed is set. Pass either this or `model`.
        compute_loss_func: `(outputs, labels) -> loss`, the mean over a batch.
        compute_metrics: makes a dict of metrics of an `EvalPrediction`. Every rank calls it with all samples.
        callbacks: instances or classes. They run after DefaultMetrics and before InfoCallback and ProgressCallback,
            which are always present unless the list has one of their class.
        optimizers: optimizer and schedule. `args` decides about each that is None.
        preprocess_logits_for_metrics: `(logits, labels) -> predictions`, to keep less than all logits.
        checkpoints: storage of checkpoints; None: folders in `args.output_dir`.

    Raises:
        UsageError: an argument is missing or does not fit; several processes run without a process group.

    Example:
        Train, then save the weights as `out/model.safetensors`::

            args = TrainingArguments("out", max_steps=1000, eval_strategy="steps")
            trainer = Trainer(model, args, train_dataset=train, eval_dataset=test, callbacks=[JsonLogger()])
            print(trainer.train().training_loss)
            trainer.save_model()
    """

    _shares: tuple[int, ...] | None = None
    """Batch of a round that each rank receives from rank 0. None: each its own."""

    def __init__(  # noqa: PLR0913  # Hugging Face's
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        callbacks: Iterable[object] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Scheduler | None] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.args = args if args is not None else TrainingArguments()
        if not isinstance(self.args, TrainingArguments):
            raise UsageError(
                f"args={self.args!r:.80}: not TrainingArguments; pass skyward.training.TrainingArguments()"
            )
        make_deterministic(self.args)
        self.ranks: Ranks = self._make_ranks()
        self.device = self._make_device()
        if (model is None) == (model_init is None):
            problem = "neither model nor model_init" if model is None else "both model and model_init"
            raise UsageError(f"{type(self).__name__}(): got {problem}; pass exactly one of them")
        if model_init is not None:
            seed_everything(self.args.seed)
            model = model_init()
        assert model is not None
        self._take(model)
        check_data_parallel(self.model, self.ranks, trainer=type(self).__name__)
        check_datasets(self.args, train_dataset, eval_dataset, reads=self._reads)
        columns = self._columns if self.args.remove_unused_columns else None
        self.data_collator = Collator(data_collator, columns, self._inputs)
        self.train_dataset, self.eval_dataset, self.processing_class = train_dataset, eval_dataset, processing_class
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self._has_own_scheduler, self._is_compiled = optimizers[1] is not None, False
        self._precision = self._make_precision()
        self._stream: Stream | None = None
        self.callback_handler = CallbackHandler(with_defaults(callbacks, self.args), ranks=self.ranks)
        self._run = TrainerRun(
            self.args, ranks=self.ranks, device=self.device, callbacks=self.callback_handler, context=self._context
        )
        self._objective = Objective(self.model, self.args, device=self.device, compute=compute_loss_func)
        self._evaluator = Evaluator(
            args=self.args,
            ranks=self._data_ranks,
            make_stream=partial(self._make_stream, is_training=False),
            share=self.ranks.share if self._is_read_by_one else str,
            count=self._objective.weight_of,
            opened=self._run.forget_context,
            stepped=partial(self._run.fire, "on_prediction_step"),
        )
        self._saver = Saver(self.args, self, run=self._run, ranks=self.ranks, checkpoints=checkpoints)

    # Parts. Subclasses override how ranks share data and what each rank holds of the model --------------------------

    def _make_ranks(self) -> Ranks:
        return ranks_of_environment(trainer=type(self).__name__)

    @property
    def _data_ranks(self) -> Ranks:
        """Ranks that have batches of their own."""
        return self.ranks

    @property
    def _is_read_by_one(self) -> bool:
        """Return whether only rank 0 needs the data sets."""
        return bool(self.args.dispatch_batches)

    @property
    def _reads(self) -> bool:
        """Return whether this rank needs the data sets."""
        return self.ranks.rank == 0 or not self._is_read_by_one

    def _make_device(self) -> torch.device:
        return device_of(self.args, self.ranks)

    def _take(self, model: nn.Module) -> None:
        """Set the part of the user's model that this rank trains, and the columns that it takes."""
        self.model_wrapped = place(model, self.device)
        self.model = unwrapped(self.model_wrapped)
        self._columns = columns_of(self.model, self.args.label_names)
        self._inputs = Inputs.of(self.model, self.args.label_names, who=type(self).__name__)

    def _make_precision(self) -> Precision:
        return Precision(self.args, self.device)

    def _make_stream(self, dataset: Any, *, is_training: bool) -> Stream:
        return make_stream(
            dataset,
            shares=self._shares,
            args=self.args,
            ranks=self.ranks,
            device=self.device,
            collate=self.data_collator,
            is_training=is_training,
        )

    # Views of the parts ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        """Progress of the run."""
        return self._run.state

    @property
    def control(self) -> TrainerControl:
        """Requests of callbacks to the run."""
        return self._run.control

    @property
    def data_parallel_size(self) -> int:
        """Number of batches trained at once: the number of ranks, or of copies of a model that spans several ranks."""
        return self._data_ranks.world_size

    def is_world_process_zero(self) -> bool:
        """Return whether this is rank 0."""
        return self.ranks.rank == 0

    def add_callback(self, callback: object) -> None:
        """Append a callback, or an instance of a callback class."""
        self.callback_handler.add(callback)

    def pop_callback(self, callback: object) -> object | None:
        """Remove a callback, or the first instance of a class, and return it."""
        return self.callback_handler.pop(callback)

    def remove_callback(self, callback: object) -> None:
        """Remove a callback, or the first instance of a class, if there is one."""
        self.callback_handler.remove(callback)

    def log(self, logs: dict[str, Any]) -> None:
        """Append `logs` to `state.log_history` with the epoch, and fire `on_log`."""
        self._run.log(logs)

    def _context(self) -> dict[str, Any]:
        """Return what every event passes in addition to arguments and state."""
        return {
            "model": self.model,
            "processing_class": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": None if self._stream is None else self._stream.loader,
            "eval_dataloader": self._evaluator.loader,
            "trainer": self,
        }

    # Training --------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None = None) -> TrainOutput:
        """Train to the end, from the beginning or from a checkpoint. Collective.

        A resumed run has the same batches, losses and logs as one without the interruption, if the data set returns
        the same rows.

        Args:
            resume_from_checkpoint: as in TrainingArguments, whose value applies if this is None.

        Returns:
            The steps of the run, its mean loss and its metrics.

        Raises:
            UsageError: there is no training data, no checkpoint, or no loss in the model's outputs.
            RankFailed: a callback or the data of another rank failed.
            CheckpointError: a checkpoint cannot be read or written.
            RunTerminated: a machine is about to go and the run is saved, with `enable_jit_checkpoint`.
        """
        begun_at, loop = time.monotonic(), self._prepare(resume_from_checkpoint)
        try:
            self._saver.open()
            return loop.train(begun_at)
        finally:
            self._saver.close()
            self.callback_handler.close()

    def _prepare(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None) -> TrainingLoop:
        """Build everything for a run, and load its checkpoint if there is one."""
        resumed = self._saver.begin(resume_from_checkpoint)
        seed_everything((self.args.seed + self.ranks.rank) % 2**32)
        self._run.restart()
        self.state.epoch = 0.0
        if self.train_dataset is None and self._reads:
            raise UsageError("train_dataset=None: nothing to train on; pass train_dataset to the trainer")
        self._stream = stream = self._make_stream(self.train_dataset, is_training=True)
        self._run.set_length(stream.rounds)
        self._prepare_model()
        if resumed is not None:
            self._saver.resume(*resumed)
        # Again: the checkpoint's state has the lengths of the run that was saved, but today's arguments decide.
        self._run.set_length(stream.rounds)
        self.model.train()
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        return TrainingLoop(
            args=self.args,
            run=self._run,
            stream=stream,
            saver=self._saver,
            model=self.model_wrapped,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            precision=self._precision,
            accumulate=self._accumulate,
            evaluate=self.evaluate,
            log=self.log,
            data_parallel_size=self.data_parallel_size,
        )

    def _prepare_model(self) -> None:
        checkpoint_activations(self.model, self.args)
        if self.args.torch_compile and not self._is_compiled:
            self.model.compile(backend=self.args.torch_compile_backend or "inductor", mode=self.args.torch_compile_mode)
            self._is_compiled = True
        self.optimizer = self.create_optimizer()
        if not self._has_own_scheduler:
            self.lr_scheduler = None  # that of an earlier train() may have another number of steps
        self.lr_scheduler = self.create_scheduler(self.state.max_steps)
        self._precision.restart()
        self._wrap()

    def _wrap(self) -> None:
        """Wrap model and optimizer for training."""
        self.model_wrapped = wrap(self.model_wrapped, self.args, self.ranks, self.device)

    def create_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer that exists, else make the one that the arguments name. Subclasses may override it."""
        return self.optimizer if self.optimizer is not None else make_optimizer(self.model, self.args)

    def create_scheduler(self, num_training_steps: int) -> Scheduler:
        """Return the schedule that exists, else make the one that the arguments name. Subclasses may override it.

        Args:
            num_training_steps: optimizer steps of the run.
        """
        if self.lr_scheduler is not None:
            return self.lr_scheduler
        assert self.optimizer is not None
        return make_scheduler(self.optimizer, self.args, num_training_steps)

    def _accumulate(self, batches: list[MicroBatch]) -> tuple[torch.Tensor, int, float]:
        """Run forward and backward of a step's micro-batches. Return their loss, tokens and operations on this rank."""
        weights = self._weigh(batches)
        total = torch.zeros((), device=self.device)
        tokens, flos = 0, 0.0
        for number, (batch, factor) in enumerate(zip(batches, weights.factors, strict=True), start=1):
            is_last = number == len(batches)
            with accumulating(self.model_wrapped, syncs=is_last):
                self._run.fire("on_forward_backward_begin")
                inputs = loss.on_device(batch.inputs, self.device)
                value = self.training_step(self.model_wrapped, inputs, factor, weights.num_items_in_batch)
                self._run.fire("on_forward_backward_end")
            total += value
            own = loss.tokens_in(inputs, self.model) if batch.samples else 0
            tokens, flos = tokens + own, flos + self.floating_point_ops(inputs, own)
            if not is_last:
                self._run.fire("on_substep_end")
        return total, tokens, flos

    def _weigh(self, batches: list[MicroBatch]) -> loss.Weights:
        return self._objective.weigh(batches, ranks=self.ranks)

    def training_step(
        self, model: nn.Module, inputs: Any, factor: float | torch.Tensor, num_items_in_batch: torch.Tensor | None
    ) -> torch.Tensor:
        """Run forward and backward of a micro-batch. Return its share of the step's loss: () float32, detached.

        Args:
            model: the model, as it is wrapped for training.
            inputs: the micro-batch, on the device.
            factor: weight of the micro-batch's loss in the step.
            num_items_in_batch: labels of the whole step, for a model that divides by them; else None.
        """
        with self._precision.autocast():
            value = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        value = value * factor
        self._precision.backward(value)
        share: torch.Tensor = value.detach().float()
        return share

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Compute the mean loss of a batch. Subclasses may override it.

        Args:
            model: the model.
            inputs: the batch, on the device.
            return_outputs: return the model's outputs too.
            num_items_in_batch: labels of the whole step, over all ranks. Set only for a model or a compute_loss_func
                that takes it, which then divides by it.

        Returns:
            The loss: () float; with `return_outputs`, a tuple of the loss and the outputs.

        Raises:
            UsageError: the outputs have no loss.
        """
        value, outputs = self._objective.compute_loss(
            model, inputs, compute=self.compute_loss_func, num_items=num_items_in_batch
        )
        return (value, outputs) if return_outputs else value

    def floating_point_ops(self, inputs: Any, tokens: int) -> float:
        """Return the operations of forward and backward: the model's own count, else 6 per parameter and token."""
        return self._objective.floating_point_ops(self.model, inputs, tokens)

    # Evaluation ------------------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, *, metric_key_prefix: str = "eval") -> dict[str, Any]:
        """Evaluate a data set, log the metrics and fire `on_evaluate`. Collective.

        Args:
            eval_dataset: a data set, or a dict of several by name; None: the trainer's `eval_dataset`.
            metric_key_prefix: prefix of the metrics' names; those of several data sets have the name behind it.

        Returns:
            The metrics: loss, runtime, speed, and those of `compute_metrics`.

        Raises:
            UsageError: there is no data set.
        """
        self._run.begin()
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, Mapping):
            prefix = metric_key_prefix
            parts = [self.evaluate(part, metric_key_prefix=f"{prefix}_{name}") for name, part in dataset.items()]
            return {name: value for metrics in parts for name, value in metrics.items()}
        only_loss = self.compute_metrics is None or self.args.prediction_loss_only
        _, metrics = self._evaluate(dataset, metric_key_prefix, keeps=not only_loss)
        self.log(metrics)
        self.control.should_evaluate = False
        self._run.fire("on_evaluate", metrics=metrics)
        return metrics

    def predict(self, test_dataset: Any, *, metric_key_prefix: str = "test") -> PredictionOutput:
        """Predict every sample of a data set, in its order, and fire `on_predict`. Collective.

        Args:
            test_dataset: as `train_dataset`.
            metric_key_prefix: prefix of the metrics' names.

        Returns:
            Predictions and labels of all samples on every rank, and metrics, with a loss if there are labels.

        Raises:
            UsageError: there is no data set.
        """
        self._run.begin()
        done, metrics = self._evaluate(test_dataset, metric_key_prefix, keeps=not self.args.prediction_loss_only)
        self._run.fire("on_predict", metrics=metrics)
        self._run.agree()
        return PredictionOutput(done.predictions, done.labels, metrics)

    def _evaluate(self, dataset: Any, prefix: str, *, keeps: bool) -> tuple[Evaluated, dict[str, Any]]:
        return self._evaluator.evaluate(
            dataset,
            prefix,
            model=self.model,
            step=lambda inputs: self.prediction_step(self.model, inputs, prediction_loss_only=not keeps),
            keeps=keeps,
            compute_metrics=self.compute_metrics,
        )

    def prediction_step(
        self, model: nn.Module, inputs: Any, *, prediction_loss_only: bool
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return loss, predictions and labels of a batch, each None if there is none. Subclasses may override it.

        Args:
            model: the model.
            inputs: the batch, on any device.
            prediction_loss_only: return only the loss.
        """
        inputs = loss.on_device(inputs, self.device)
        labels = loss.labels_of(inputs, self.args.label_names)
        is_overridden = type(self).compute_loss is not Trainer.compute_loss
        with self._precision.autocast():
            if labels is not None or is_overridden:
                value, outputs = self.compute_loss(model, inputs, return_outputs=True)
            else:
                outputs = loss.call(model, inputs)
                value = loss_in(outputs)
        if prediction_loss_only:
            return value, None, None
        ignored = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ("past_key_values",))
        return value, self._predictions_in(outputs, labels, tuple(ignored)), labels

    def _predictions_in(self, outputs: Any, labels: Any, ignored: tuple[str, ...] = ()) -> Any:
        predictions = outputs_without_loss(outputs, ignored)
        if self.preprocess_logits_for_metrics is not None:
            predictions = self.preprocess_logits_for_metrics(predictions, labels)
        return predictions
