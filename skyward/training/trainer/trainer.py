"""A PyTorch training loop that fires every event, agrees with its other ranks, and resumes to the bit.

Names, defaults, cadence and the order of events are those of Hugging Face's Trainer, which it does not import. What
differs is said where it does. A `Trainer` has a `TrainerRun` (where it is, and its events), an `Objective` (what it
minimises), an `Evaluator` and a `Saver`; `train` makes a `TrainingLoop` of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..agree import Ranks
from ..arguments import TrainingArguments
from ..bus import CallbackHandler
from ..checkpoint import Checkpoints, ModelState, OptimizerState, RNGState, SharingPattern, StateComponent
from ..checkpoint.rng import seed_everything
from ..events import TrainerControl, TrainerState
from ..parts import unwrapped
from . import loss
from .batches import MicroBatch
from .collate import Collator, Inputs, columns_of
from .data_sources import check_datasets
from .evaluation import Evaluated, Evaluator, loss_in, outputs_without_loss
from .loop import TrainingLoop
from .loss import Objective
from .optimization import Scheduler, make_optimizer, make_scheduler
from .outputs import EvalPrediction, PredictionOutput, TrainOutput
from .precision import Precision, make_deterministic
from .run import TrainerRun, with_defaults
from .saver import CheckpointParts, Saver, save_weights
from .stream import Stream, make_stream
from .world import (
    accumulating,
    check_data_parallel,
    checkpoint_activations,
    device_of,
    is_sharded,
    place,
    ranks_of_environment,
    wrap,
)

__all__ = ["Trainer"]


class Trainer:
    """Trains, evaluates and predicts with one model, alone or as one rank of torch's process group.

    model: any module that gives its loss (`loss_of` in loss.py says how), or whatever `compute_loss_func(outputs,
        labels)` takes. In a world of several ranks it is wrapped in DistributedDataParallel, unless it is, or is
        sharded by `fully_shard`. model_init: makes it, after the seed is set, in place of `model`.
    args: TrainingArguments(); what it says is checked when it is made.
    data_collator: from a list of rows to a batch; by default tensors are stacked.
    train_dataset, eval_dataset: with `len` and indices, or an iterable, or a DataLoader; several of the latter by name.
    compute_metrics: from `EvalPrediction` to a dictionary; every rank calls it with all samples.
    callbacks: objects or classes, called behind DefaultMetrics and before InfoCallback and ProgressCallback, which are
        there unless one of their class is given.
    optimizers: the user's own optimizer and schedule; those that are None are made as args says.
    checkpoints: where states go; by default folders in `args.output_dir`.

    With several ranks, all of them construct it and call its methods, in the same order. Not for several threads.
    Raises: UsageError.
    """

    _shares: tuple[int, ...] | None = None
    """By rank, which batch of a round it gets from rank 0; None: its own."""

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
            raise UsageError(f"Trainer: args={self.args!r:.80}: must be a skyward.training.TrainingArguments")
        make_deterministic(self.args)
        self.ranks: Ranks = self._make_ranks()
        self.device = self._make_device()
        if (model is None) == (model_init is None):
            raise UsageError("Trainer: one of model= and model_init= is needed, and not both")
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
        self._given_scheduler, self._is_compiled = optimizers[1] is not None, False
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

    # What it is made of; trainers of models in other shapes override how ranks lie and what is made of the model ------

    def _make_ranks(self) -> Ranks:
        return ranks_of_environment(trainer=type(self).__name__)

    @property
    def _data_ranks(self) -> Ranks:
        """The ranks that have batches of their own."""
        return self.ranks

    @property
    def _is_read_by_one(self) -> bool:
        """Whether rank 0 alone needs the data sets."""
        return bool(self.args.dispatch_batches)

    @property
    def _reads(self) -> bool:
        """Whether this rank needs them."""
        return self.ranks.rank == 0 or not self._is_read_by_one

    def _make_device(self) -> torch.device:
        return device_of(self.args, self.ranks)

    def _take(self, model: nn.Module) -> None:
        """Take what this rank trains of the user's model, the columns to keep, and what a batch must have some of."""
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

    # What users see of its parts -------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        return self._run.state

    @property
    def control(self) -> TrainerControl:
        return self._run.control

    @property
    def checkpoints(self) -> Checkpoints:
        """Where states go."""
        return self._saver.checkpoints

    @checkpoints.setter
    def checkpoints(self, checkpoints: Checkpoints) -> None:
        self._saver.checkpoints = checkpoints

    @property
    def data_parallel_size(self) -> int:
        """How many batches are trained on at once: the ranks, or the copies of a model that lies on several."""
        return self._data_ranks.world_size

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.rank == 0

    def add_callback(self, callback: object) -> None:
        """Appends a callback, or a class of one."""
        self.callback_handler.add(callback)

    def pop_callback(self, callback: object) -> object | None:
        """Removes a callback, or the first of a class, and gives it."""
        return self.callback_handler.pop(callback)

    def remove_callback(self, callback: object) -> None:
        """As `pop_callback`; gives nothing."""
        self.callback_handler.remove(callback)

    def log(self, logs: dict[str, Any]) -> None:
        """Appends to the state's log_history, and tells the callbacks. `epoch` is added."""
        self._run.log(logs)

    def _context(self) -> dict[str, Any]:
        """What every event gives, beside arguments and state."""
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
        """Trains to the end, from the beginning or from a checkpoint.

        resume_from_checkpoint: as in TrainingArguments, whose value counts where this is None.

        A run that goes on gives what it would have given without the interruption: the same batches, losses and logs,
        if the data set gives the same rows.
        """
        begun_at, loop = time.monotonic(), self._prepare(resume_from_checkpoint)
        try:
            self._saver.open()
            return loop.train(begun_at)
        finally:
            self._saver.close()
            self.callback_handler.close()

    def _prepare(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None) -> TrainingLoop:
        """Make everything, and load the checkpoint if there is one."""
        resumed = self._saver.begin(resume_from_checkpoint)
        seed_everything((self.args.seed + self.ranks.rank) % 2**32)
        self._run.restart()
        self.state.epoch = 0.0
        if self.train_dataset is None and self._reads:
            raise UsageError("Trainer.train: needs a train_dataset")
        self._stream = stream = self._make_stream(self.train_dataset, is_training=True)
        self._run.set_length(stream.rounds)
        self._prepare_model()
        if resumed is not None:
            self._saver.resume(*resumed)
        # What the arguments say now holds, not what they said when the checkpoint was made.
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
        if not self._given_scheduler:
            self.lr_scheduler = None  # one of an earlier train() knew another number of steps
        self.lr_scheduler = self.create_scheduler(self.state.max_steps)
        self._precision.restart()
        self._wrap()

    def _wrap(self) -> None:
        """Put around model and optimizer what is there while they are trained."""
        self.model_wrapped = wrap(self.model_wrapped, self.args, self.ranks, self.device)

    def create_optimizer(self) -> torch.optim.Optimizer:
        """That which was given, or was made before, or the one that the arguments name. To be overridden."""
        return self.optimizer if self.optimizer is not None else make_optimizer(self.model, self.args)

    def create_scheduler(self, num_training_steps: int) -> Scheduler:
        """That which was given, or the one that the arguments name. To be overridden."""
        if self.lr_scheduler is not None:
            return self.lr_scheduler
        assert self.optimizer is not None
        return make_scheduler(self.optimizer, self.args, num_training_steps)

    def _accumulate(self, batches: list[MicroBatch]) -> tuple[torch.Tensor, int, float]:
        """Forward and backward of a step's micro-batches. Gives their loss, tokens and operations on this rank."""
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
        """Forward and backward of a micro-batch that counts `factor`. Gives its share of the step's loss, detached."""
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
        """The mean loss of a batch, and what the model gave. To be overridden.

        num_items_in_batch: labels of the whole step, over all ranks, for a model or a compute_loss_func that takes it:
        it divides by it then.
        """
        value, outputs = self._objective.compute_loss(
            model, inputs, compute=self.compute_loss_func, num_items=num_items_in_batch
        )
        return (value, outputs) if return_outputs else value

    def floating_point_ops(self, inputs: Any, tokens: int) -> float:
        """Of forward and backward: what the model says itself, else 6 for each parameter and token."""
        return self._objective.floating_point_ops(self.model, inputs, tokens)

    # Evaluation ------------------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, *, metric_key_prefix: str = "eval") -> dict[str, Any]:
        """The metrics of a data set; of several by name, one after the other. Tells the callbacks."""
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
        """The predictions of every sample, in order, on every rank; and metrics, where there are labels."""
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
        """The loss, predictions and labels of a batch, each None where there is none. To be overridden."""
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

    # What is kept ----------------------------------------------------------------------------------------------------

    def get_state_components(self, *, for_saving: bool = False) -> list[StateComponent]:
        """What a checkpoint of this run is made of. Between `train`'s begin and end.

        for_saving: with `save_only_model`, of the model only.
        """
        model, shared = self._model_component(), self._shared_pattern()
        if for_saving and self.args.save_only_model:
            return [model]
        assert self._stream is not None
        assert self.lr_scheduler is not None
        assert self.optimizer is not None
        is_cut = is_sharded(self.model)
        optimizer = OptimizerState(self.model, self.optimizer, whole=True) if is_cut else self.optimizer
        parts: list[tuple[str, Any, SharingPattern]] = [
            ("optimizer", optimizer, shared),
            ("scheduler", self.lr_scheduler, shared),
            ("scaler", self._precision, shared),
            ("dataset", self._stream, self._stream.sharing_pattern),
            ("callbacks", self.callback_handler, SharingPattern.GLOBAL),
            ("trainer", self._run, SharingPattern.GLOBAL),
            ("rng", RNGState(), SharingPattern.PER_RANK),
        ]
        return [model, *(self._component(key, part, how) for key, part, how in parts)]

    def get_process_groups(self) -> dict[str, Any]:
        """Groups that components name: none."""
        return {}

    def _shared_pattern(self) -> SharingPattern:
        """Of model, optimizer and schedule. The state of a sharded model is gathered: then there is one, too."""
        is_replicated = self.ranks.world_size > 1 and not is_sharded(self.model)
        return SharingPattern.REPLICATED if is_replicated else SharingPattern.GLOBAL

    def _model_component(self) -> StateComponent:
        model = ModelState(self.model, whole=True) if is_sharded(self.model) else self.model
        return self._component("model", model, self._shared_pattern())

    def _component(self, key: str, stateful: Any, pattern: SharingPattern) -> StateComponent:
        """Replicas of model and optimizer are compared at every save: ranks that have drifted apart are found then."""
        is_compared = pattern is SharingPattern.REPLICATED and key in ("model", "optimizer")
        return StateComponent(key, stateful, pattern, validate_replication=is_compared)

    def load_checkpoint(
        self,
        path: bool | str | os.PathLike[str],
        strict: bool = True,
        *,
        only: Collection[str] | None = None,
        skip: Collection[str] = (),
    ) -> None:
        """Load the model of a checkpoint now, and the rest when `train` begins, which then goes on from there.

        Collective. `train(resume_from_checkpoint=...)` takes another checkpoint instead.

        Args:
            path: a folder, True (the newest) or "auto" (the newest, if there is one), as in TrainingArguments.
            strict: False: what the checkpoint lacks is warned of, and stays as it is.
            only: keys of the components that count, such as "model", "optimizer", "dataset"; None: all of them. With
                `only=["model"]` a new run begins at step 0 with these weights.
            skip: keys of those that do not.

        Raises:
            UsageError: there is no checkpoint, or no such component; the latter when `train` begins.
            CheckpointNotFound, CheckpointCorrupt, CheckpointMismatch: on all ranks, before anything is changed.
        """
        found = self._saver.choose(path, CheckpointParts(strict=strict, only=only, skip=skip))
        if found is not None and "model" not in skip and (only is None or "model" in only):
            groups = self.get_process_groups()
            self.checkpoints.load(found, [self._model_component()], strict=strict, process_groups=groups)

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Writes the weights: as the model does it (`save_pretrained`), else as model.safetensors. Collective."""
        folder = str(self.args.output_dir) if output_dir is None else os.fspath(output_dir)
        save_weights(self.model, folder, self.ranks)
