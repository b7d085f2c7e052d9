"""A PyTorch training loop that fires every event, agrees with its other ranks, and resumes to the bit.

Names, defaults, cadence and the order of events are those of Hugging Face's Trainer, which it does not import. What
differs is said where it does. One file, because it is one narrative: `train` reads from top to bottom.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...errors import UsageError
from ..agree import Ranks, ranks_of_this_process
from ..arguments import TrainingArguments
from ..bus import CallbackHandler
from ..checkpoint import (
    Checkpoints,
    FileCheckpoints,
    RNGState,
    RunTerminated,
    SharingPattern,
    StateComponent,
)
from ..checkpoint.rng import seed_everything
from ..events import TrainerControl, TrainerState
from . import flow, loss
from .batches import MicroBatch
from .collate import Collator, columns_of
from .defaults import with_defaults
from .evaluation import Evaluated, evaluate, evaluating, loss_in, outputs_without_loss, plain
from .optimization import Scheduler, learning_rate_of, make_optimizer, make_scheduler
from .outputs import EvalPrediction, PredictionOutput, TrainOutput
from .precision import Precision
from .reading import has_length
from .record import Record
from .saves import Saved, Saves, Termination, checkpoint_to_resume
from .states import ModelState, OptimizerState, RunState, write_weights
from .stream import Stream, is_map_style, make_stream
from .world import accumulating, device_of, is_sharded, place, unwrap, wrap

__all__ = ["Trainer"]

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Position:
    """Where in the data a run is; kept in checkpoints.

    rounds: micro-batches taken in the epoch. is_stopped: a callback asked for its end. owes_evaluation: one that was
    due after this step was not made.
    """

    epoch: int = 0
    rounds: int = 0
    is_stopped: bool = False
    owes_evaluation: bool = False


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
        self.ranks: Ranks = self._make_ranks()
        self.device = self._make_device()
        if (model is None) == (model_init is None):
            raise UsageError("Trainer: one of model= and model_init= is needed, and not both")
        if model_init is not None:
            seed_everything(self.args.seed)
            model = model_init()
        assert model is not None
        self._take(model)
        columns = self._columns_to_keep() if self.args.remove_unused_columns else None
        self.data_collator = Collator(data_collator, columns)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_class
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self._given_scheduler = optimizers[1] is not None
        self.checkpoints: Checkpoints = checkpoints or FileCheckpoints(
            str(self.args.output_dir), ranks=self.ranks, on_each_node=self.args.save_on_each_node
        )
        self.state, self.control = self._new_state(), TrainerControl()
        self.callback_handler = CallbackHandler(with_defaults(callbacks, self.args), ranks=self.ranks)
        self._precision = self._make_precision()
        self._record = Record(self.ranks, self.device, filters=self.args.logging_nan_inf_filter)
        self._position = Position()
        self._stream: Stream | None = None
        self._eval_streams: dict[str, Stream] = {}
        self._eval_loader: Any = None
        self._context: dict[str, Any] | None = None
        self._last_step: tuple[torch.Tensor | None, float] = (None, 0.0)  # its gradients' norm, its learning rate
        self._pending_rng: str | None = None
        self._is_scheduled = False  # whether the cadence asks for the save that is asked for
        self._weights: int | None = None  # parameters but for tables of embeddings, counted when needed
        self._is_compiled = self._has_begun = False
        self._saves, self._termination = Saves(self.checkpoints, self.args), Termination(self.args, self.ranks)
        counts = self.compute_loss_func if self.compute_loss_func is not None else self.model
        self._counts_itself = loss.takes_num_items(counts)
        self._shifts_labels = loss.shifts_labels(self.model)
        self._check_datasets()

    def _make_ranks(self) -> Ranks:
        world = os.environ.get("WORLD_SIZE", "1")
        if "RANK" in os.environ and world not in ("", "1") and not _has_process_group():
            # Each of them would train alone, on all of the data, into the same folder.
            raise UsageError(
                f"{type(self).__name__}: WORLD_SIZE={world} says that this is one of several processes, but "
                "torch.distributed is not initialized; call init_process_group first, use @sky.integrations.torch, or "
                "unset WORLD_SIZE"
            )
        return ranks_of_this_process()

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

    def _take(self, model: nn.Module) -> None:
        """What this rank trains of the user's model."""
        self.model_wrapped = place(model, self.device)
        self.model = unwrap(self.model_wrapped)

    def _columns_to_keep(self) -> frozenset[str] | None:
        return columns_of(self.model, self.args.label_names)

    def _make_device(self) -> torch.device:
        return device_of(self.args, self.ranks)

    def _make_precision(self) -> Precision:
        return Precision(self.args, self.device)

    def _check_datasets(self) -> None:
        args, name = self.args, type(self.args).__name__
        if args.eval_strategy != "no" and self.eval_dataset is None and self._reads:
            raise UsageError(f"{name}.eval_strategy={args.eval_strategy!r}: needs an eval_dataset, or 'no'")
        if self.train_dataset is not None and not has_length(self.train_dataset) and args.max_steps <= 0:
            raise UsageError(
                f"{name}.max_steps={args.max_steps}: the train_dataset has no length, so nobody knows when an epoch "
                "ends; say how many steps, above 0"
            )

    # Callbacks -------------------------------------------------------------------------------------------------------

    def add_callback(self, callback: object) -> None:
        """Appends a callback, or a class of one."""
        self.callback_handler.add(callback)

    def pop_callback(self, callback: object) -> object | None:
        """Removes a callback, or the first of a class, and gives it."""
        return self.callback_handler.pop(callback)

    def remove_callback(self, callback: object) -> None:
        """As `pop_callback`; gives nothing."""
        self.callback_handler.remove(callback)

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.rank == 0

    @property
    def data_parallel_size(self) -> int:
        """How many batches are trained on at once: the ranks, or the copies of a model that lies on several."""
        return self._data_ranks.world_size

    def _fire(self, event: str, **more: Any) -> None:
        if not self.callback_handler.listens(event):
            return
        context = self._context if self._context is not None else self._new_context()
        self.control = self.callback_handler.dispatch(event, self.control, context | more if more else context)

    def _new_context(self) -> dict[str, Any]:
        """What every event gives. Made anew for each step: users may put other objects in place of these."""
        self._context = {
            "args": self.args,
            "state": self.state,
            "model": self.model,
            "processing_class": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": None if self._stream is None else self._stream.loader,
            "eval_dataloader": self._eval_loader,
            "trainer": self,
        }
        return self._context

    def _agree(self) -> None:
        self.control = self.callback_handler.agree(self.control)
        if self.control.should_abort_without_save:
            self.control.should_training_stop = True
            self.control.should_save = self.control.should_evaluate = False

    # Training --------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None = None) -> TrainOutput:
        """Trains to the end, from the beginning or from a checkpoint.

        resume_from_checkpoint: as in TrainingArguments, whose value counts where this is None.

        A run that goes on gives what it would have given without the interruption: the same batches, losses and logs,
        if the data set gives the same rows.
        """
        begun_at, begun_with = time.monotonic(), self._prepare(resume_from_checkpoint)
        try:
            with self._termination:
                return self._train(begun_at, begun_with)
        finally:
            self._saves.close()
            self.callback_handler.close()

    def _train(self, begun_at: float, begun_with: int) -> TrainOutput:
        self._begin()
        self.control.should_training_stop = self.control.should_abort_without_save = False
        self._fire("on_train_begin")
        self._agree()
        if self.args.eval_on_start and begun_with == 0:
            self._evaluate(is_scheduled=False)
        while self._position.epoch < self.state.num_train_epochs:
            self._run_epoch()
            if self.control.should_training_stop:
                break
        return self._finish(begun_at, begun_with)

    def _prepare(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None) -> int:
        """Makes everything, loads the checkpoint if there is one. Gives the step that the run begins after."""
        path = checkpoint_to_resume(resume_from_checkpoint, self.args, self.checkpoints, self.ranks)
        seed_everything((self.args.seed + self.ranks.rank) % 2**32)
        self.state = self._new_state()
        self.state.epoch = 0.0
        self._position = Position()
        self._saves, self._termination = Saves(self.checkpoints, self.args), Termination(self.args, self.ranks)
        self._record = Record(self.ranks, self.device, filters=self.args.logging_nan_inf_filter)
        if self.train_dataset is None and self._reads:
            raise UsageError("Trainer.train: needs a train_dataset")
        self._stream = self._make_stream(self.train_dataset, is_training=True)
        self._set_length(self._stream.rounds)
        self._prepare_model()
        if path is not None:
            self._load(path, skip={"rng"})
            self._pending_rng = path
        # What the arguments say now holds, not what they said when the checkpoint was made.
        self._set_length(self._stream.rounds)
        self.model.train()
        self._context = None
        return self.state.global_step

    def _prepare_model(self) -> None:
        if self.args.torch_compile and not self._is_compiled:
            self.model.compile(backend=self.args.torch_compile_backend or "inductor", mode=self.args.torch_compile_mode)
            self._is_compiled = True
        self.optimizer = self.create_optimizer()
        if not self._given_scheduler:
            self.lr_scheduler = None  # one of an earlier train() knew another number of steps
        self.lr_scheduler = self.create_scheduler(self.state.max_steps)
        self._wrap()
        self._precision = self._make_precision()

    def _wrap(self) -> None:
        """What stands around model and optimizer while they are trained."""
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

    def _make_stream(self, dataset: Any, *, is_training: bool) -> Stream:
        return self._stream_of(dataset, is_training=is_training, shares=None)

    def _stream_of(self, dataset: Any, *, is_training: bool, shares: tuple[int, ...] | None) -> Stream:
        return make_stream(
            dataset,
            shares=shares,
            args=self.args,
            ranks=self.ranks,
            device=self.device,
            collate=self.data_collator,
            is_training=is_training,
        )

    def _new_state(self) -> TrainerState:
        return TrainerState(
            is_world_process_zero=self.ranks.rank == 0,
            is_local_process_zero=self.ranks.local_rank == 0,
            train_batch_size=self.args.train_batch_size,
        )

    def _set_length(self, rounds: int | None) -> None:
        """How many steps and epochs the run has. rounds: micro-batches of an epoch, None: not known."""
        args, state = self.args, self.state
        if rounds is None and args.max_steps <= 0:
            raise UsageError(
                f"{type(args).__name__}.max_steps={args.max_steps}: the data has no length; set it above 0"
            )
        if rounds is None:
            state.max_steps, state.num_train_epochs = args.max_steps, sys.maxsize
            self._rounds_per_epoch = args.max_steps * args.gradient_accumulation_steps
        else:
            steps = max(1, -(-rounds // args.gradient_accumulation_steps))
            state.max_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps)
            state.num_train_epochs = (
                -(-args.max_steps // steps) if args.max_steps > 0 else math.ceil(args.num_train_epochs)
            )
            self._rounds_per_epoch = max(1, rounds)
        flow.resolve_steps(args, state, state.max_steps)

    def _begin(self) -> None:
        """Tells the callbacks once that the trainer is made; a resumed run's states are loaded by then."""
        if not self._has_begun:
            self._has_begun = True
            self._fire("on_init_end")
            self._agree()

    def _run_epoch(self) -> None:
        assert self._stream is not None
        position = self._position
        self.control.should_epoch_stop = False
        if position.rounds == 0:
            self._restore_rng()  # the run that was saved drew what callbacks draw here after it was saved
            self._make_up_evaluation()
        self._fire("on_epoch_begin")
        if not position.is_stopped:
            self._stream.open(position.epoch, skip=0 if self.args.ignore_data_skip else position.rounds)
            self._restore_rng()
            self._make_up_evaluation()
            self._run_steps(self._stream)
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        flow.at_epoch_end(self.args, self.state, self.control)
        self._is_scheduled = self.control.should_save
        self._fire("on_epoch_end")
        # What is saved now goes on with the next epoch.
        self._position = Position(epoch=position.epoch + 1)
        self._log_evaluate_save()

    def _run_steps(self, stream: Stream) -> None:
        has_data = self._position.rounds > 0
        # An interrupted run that had all its steps has none to do: the flag that ended it is not kept.
        while self.state.global_step < self.state.max_steps:
            batches = stream.take(self.args.gradient_accumulation_steps)
            if not batches:
                break
            has_data = True
            self._step(batches)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        if not has_data:
            _log.warning("no data in epoch %d: training stops at step %d", self._position.epoch, self.state.global_step)
            self.control.should_training_stop = True

    def _step(self, batches: list[MicroBatch]) -> None:
        """One optimizer step, from the first micro-batch to the checkpoint after it."""
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False
        self._context = None
        self._fire("on_step_begin")
        step_loss, tokens, flos = self._accumulate(batches)
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        norm = self._precision.clip(self.optimizer, self.model_wrapped.parameters(), self.args.max_grad_norm)
        self._fire("on_pre_optimizer_step")
        was_made = self._precision.step(self.optimizer)
        self._fire("on_optimizer_step")  # gradients are still there, as Hugging Face promises
        rate = learning_rate_of(self.optimizer)
        if was_made and not isinstance(self.lr_scheduler, ReduceLROnPlateau):
            self.lr_scheduler.step()
        self.model_wrapped.zero_grad(set_to_none=True)
        self._record.add(step_loss, tokens=tokens, flos=flos)
        self._fire("on_train_metrics", metrics={"loss": step_loss, "grad_norm": norm, "tokens": tokens})
        self.state.global_step += 1
        self._position.rounds += len(batches)
        self.state.epoch = self._position.epoch + self._position.rounds / self._rounds_per_epoch
        flow.at_step_end(self.args, self.state, self.control)
        self._is_scheduled = self.control.should_save
        self._fire("on_step_end")
        self._last_step = (norm, rate)
        self._log_evaluate_save()

    def _accumulate(self, batches: list[MicroBatch]) -> tuple[torch.Tensor, int, float]:
        """Forward and backward of a step's micro-batches. Gives their loss, tokens and operations on this rank."""
        weights = self._weigh(batches)
        total = torch.zeros((), device=self.device)
        tokens, flos = 0, 0.0
        for number, (batch, factor) in enumerate(zip(batches, weights.factors, strict=True), start=1):
            is_last = number == len(batches)
            with accumulating(self.model_wrapped, syncs=is_last):
                self._fire("on_forward_backward_begin")
                inputs = loss.on_device(batch.inputs, self.device)
                value = self.training_step(self.model_wrapped, inputs, factor, weights.num_items_in_batch)
                self._fire("on_forward_backward_end")
            total += value
            own = loss.tokens_in(inputs, self.model) if batch.samples else 0
            tokens, flos = tokens + own, flos + self.floating_point_ops(inputs, own)
            if not is_last:
                self._fire("on_substep_end")
        return total, tokens, flos

    def _weigh(self, batches: list[MicroBatch]) -> loss.Weights:
        return self._weights_of(batches, ranks=self.ranks)

    def _weights_of(self, batches: list[MicroBatch], *, ranks: Ranks, group: Any = None) -> loss.Weights:
        return loss.weigh(
            batches,
            args=self.args,
            ranks=ranks,
            group=group,
            device=self.device,
            counts_itself=self._counts_itself,
            shifts_labels=self._shifts_labels,
        )

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
        counted = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        if self.compute_loss_func is None:
            outputs = loss.call(model, inputs, **counted)
            value = loss.loss_of(outputs, model)
        else:
            labels, inputs = loss.apart(inputs, self.args.label_names)
            outputs = loss.call(model, inputs)
            value = self.compute_loss_func(outputs, labels, **counted)
        return (value, outputs) if return_outputs else value

    def floating_point_ops(self, inputs: Any, tokens: int) -> float:
        """Of forward and backward: what the model says itself, else 6 for each parameter and token."""
        counts = getattr(self.model, "floating_point_ops", None)
        if counts is not None and isinstance(inputs, Mapping):
            return float(counts(inputs))
        if self._weights is None:
            tables = {id(each.weight) for each in self.model.modules() if isinstance(each, nn.Embedding)}
            self._weights = sum(each.numel() for each in self.model.parameters() if id(each) not in tables)
        return 6.0 * tokens * self._weights

    # What happens between steps --------------------------------------------------------------------------------------

    def _log_evaluate_save(self) -> None:
        """What the flags ask for, at the end of a step or of an epoch. They are agreed whenever callbacks had a say."""
        is_scheduled = self._is_scheduled
        self._is_scheduled = False
        self._tell_of(self._saves.poll())
        self._agree()
        if self.control.should_log and self._record.steps:
            self._log_step()
            self._agree()
        if self._termination.is_near() and not self.control.should_abort_without_save:
            self._save_and_go()
        if self.control.should_evaluate:
            is_best = self._is_best(self._evaluate())
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
            self._agree()
        is_cut_short = self.control.should_training_stop and self.state.global_step < self.state.max_steps
        if is_cut_short and self.args.save_strategy != "no" and self._saves.begun_at != self.state.global_step:
            self.control.should_save = not self.control.should_abort_without_save
        if self.control.should_save:
            # Only what the cadence alone asks for may be left out.
            is_last = self.control.should_training_stop or self.state.global_step >= self.state.max_steps
            is_best = self.state.best_global_step == self.state.global_step
            self._save(is_needed=is_last or is_best or not is_scheduled)
            self._agree()

    def _make_up_evaluation(self) -> None:
        if self._position.owes_evaluation:
            self._position.owes_evaluation = False
            self.control.should_evaluate = True
            self._log_evaluate_save()

    def _log_step(self) -> None:
        norm, rate = self._last_step
        memory = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        mean, tokens, flos, memories = self._record.drain(memory)
        self.state.num_input_tokens_seen += tokens
        self.state.total_flos += flos
        logs: dict[str, Any] = {"loss": mean}
        if norm is not None:
            logs["grad_norm"] = norm.item()
        logs["learning_rate"] = rate
        if tokens:
            logs["tokens"], logs["total_flos"] = tokens, self.state.total_flos
        if memory is not None:
            logs["peak_mem_allocated"] = memories
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
        self.control.should_log = False
        self._fire("on_log_step", logs=logs)
        self.log(logs)

    def log(self, logs: dict[str, Any]) -> None:
        """Appends to the state's log_history, and tells the callbacks. `epoch` is added."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.control.should_log = False
        self.state.log_history.append({**plain(logs), "step": self.state.global_step})
        self._fire("on_log", logs=logs)

    def _save(self, *, is_needed: bool) -> None:
        step, state = self.state.global_step, self.state
        self.control.should_save = False
        if self._saves.is_left_out(is_needed=is_needed):
            _log.info("step %d is not saved: the checkpoint before it is still being written", step)
            return
        self._tell_of(self._saves.wait())
        if state.best_global_step == step:
            state.best_model_checkpoint = os.path.join(str(self.args.output_dir), f"checkpoint-{step}")
        components = self.get_state_components(for_saving=True)
        best = state.best_model_checkpoint
        self._tell_of(self._saves.begin(step, components, groups=self.get_process_groups(), best=best))

    def _tell_of(self, saved: Saved | None) -> None:
        """A checkpoint is durable, if there is one: only now may older ones go."""
        if saved is None:
            return
        if self.args.save_total_limit is not None:
            best = {saved.best, self.state.best_model_checkpoint} - {None}
            self.checkpoints.prune(keep=self.args.save_total_limit, protect=[str(each) for each in best])
        self._fire("on_save", checkpoint=saved.path, saved_step=saved.step)

    def _save_and_go(self) -> None:
        """The machine is about to go. An evaluation would take too long; the run that goes on makes it up.

        Raises: RunTerminated.
        """
        step = self.state.global_step
        self._position.owes_evaluation = self.control.should_evaluate
        _log.warning("this run is being ended: saving step %d first", step)
        if self._saves.begun_at != step:
            self._tell_of(self._saves.wait(self._termination.left_s))
            self._save(is_needed=True)
        self._tell_of(self._saves.wait(self._termination.left_s))
        self._agree()
        raise RunTerminated(self.checkpoints.path_of(step))

    def _finish(self, begun_at: float, begun_with: int) -> TrainOutput:
        self._tell_of(self._saves.wait())
        if self._record.steps:
            _, tokens, flos, _ = self._record.drain()
            self.state.num_input_tokens_seen += tokens
            self.state.total_flos += flos
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            self._load(best, only={"model"})
        steps = self.state.global_step - begun_with
        width = self.args.train_batch_size * self.args.gradient_accumulation_steps * self._data_ranks.world_size
        runtime = time.monotonic() - begun_at
        metrics: dict[str, Any] = {
            **_speed("train", runtime, samples=steps * width, steps=steps),
            "total_flos": self.state.total_flos,
            "train_loss": self._record.mean_of_run(),
        }
        self.log(metrics)
        self._agree()
        self._fire("on_train_end")
        self._agree()
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def get_state_components(self, *, for_saving: bool = False) -> list[StateComponent]:
        """What a checkpoint of this run is made of. Between `train`'s begin and end.

        for_saving: with `save_only_model`, of the model only.
        """
        assert self._stream is not None
        assert self.lr_scheduler is not None
        assert self.optimizer is not None
        shared = self._shared_pattern()
        model = self._component("model", ModelState(self.model), shared)
        if for_saving and self.args.save_only_model:
            return [model]
        optimizer = OptimizerState(self.model, self.optimizer)
        run = RunState(self._state_of_run, self._load_state_of_run, self._record.gather)
        parts: list[tuple[str, Any, SharingPattern]] = [
            ("optimizer", optimizer, shared),
            ("scheduler", self.lr_scheduler, shared),
            ("scaler", self._precision, shared),
            ("dataset", self._stream, self._stream.sharing_pattern),
            ("callbacks", self.callback_handler, SharingPattern.GLOBAL),
            ("trainer", run, SharingPattern.GLOBAL),
            ("rng", RNGState(), SharingPattern.PER_RANK),
        ]
        return [model, *(self._component(key, part, how) for key, part, how in parts)]

    def _component(self, key: str, stateful: Any, pattern: SharingPattern) -> StateComponent:
        """Replicas of model and optimizer are compared at every save: ranks that have drifted apart are found then."""
        is_compared = pattern is SharingPattern.REPLICATED and key in ("model", "optimizer")
        return StateComponent(key, stateful, pattern, validate_replication=is_compared)

    def get_process_groups(self) -> dict[str, Any]:
        """Groups that components name: none."""
        return {}

    def _shared_pattern(self) -> SharingPattern:
        """Of model, optimizer and schedule. The state of a sharded model is gathered: then there is one, too."""
        is_replicated = self.ranks.world_size > 1 and not is_sharded(self.model)
        return SharingPattern.REPLICATED if is_replicated else SharingPattern.GLOBAL

    def _state_of_run(self) -> dict[str, Any]:
        position = asdict(self._position)
        position["is_stopped"] = self.control.should_epoch_stop and self._position.rounds > 0
        return {"state": asdict(self.state), "position": position}

    def _load_state_of_run(self, state: dict[str, Any], record: dict[str, Any]) -> None:
        known = {each.name for each in fields(TrainerState)} - {"is_world_process_zero", "is_local_process_zero"}
        for name, value in state["state"].items():
            if name in known:
                setattr(self.state, name, value)
        best = self.state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):
            _log.warning("the best checkpoint, %s, is not there any more; it is forgotten", best)
            self.state.best_model_checkpoint = None
        self._position = Position(**state["position"])
        self._record.restore(record)

    def _restore_rng(self) -> None:
        if self._pending_rng is not None:
            path, self._pending_rng = self._pending_rng, None
            self._load(path, only={"rng"})

    def _load(self, path: str, *, only: Collection[str] | None = None, skip: Collection[str] = ()) -> None:
        components = self.get_state_components()
        keys = {each.key for each in components} - set(skip) if only is None else only
        self.checkpoints.load(path, components, only=keys, process_groups=self.get_process_groups())

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Writes the weights: as the model does it (`save_pretrained`), else as model.safetensors. Collective."""
        folder = os.fspath(output_dir if output_dir is not None else str(self.args.output_dir))
        weights = ModelState(self.model).state_dict()
        if self.ranks.rank == 0:
            save = getattr(self.model, "save_pretrained", None)
            if save is not None:
                os.makedirs(folder, exist_ok=True)
                save(folder, state_dict=weights)
            else:
                write_weights(folder, weights)
        self.ranks.exchange(None)

    # Evaluation ------------------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset: Any = None, *, metric_key_prefix: str = "eval") -> dict[str, Any]:
        """The metrics of a data set; of several by name, one after the other. Tells the callbacks."""
        self._begin()
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, Mapping):
            found: dict[str, Any] = {}
            for name, each in dataset.items():
                found.update(self.evaluate(each, metric_key_prefix=f"{metric_key_prefix}_{name}"))
            return found
        only_loss = self.compute_metrics is None or self.args.prediction_loss_only
        _, metrics = self._evaluated(dataset, metric_key_prefix, keeps=not only_loss)
        self.log(metrics)
        self.control.should_evaluate = False
        self._fire("on_evaluate", metrics=metrics)
        return metrics

    def predict(self, test_dataset: Any, *, metric_key_prefix: str = "test") -> PredictionOutput:
        """The predictions of every sample, in order, on every rank; and metrics, where there are labels."""
        self._begin()
        done, metrics = self._evaluated(test_dataset, metric_key_prefix, keeps=not self.args.prediction_loss_only)
        self._fire("on_predict", metrics=metrics)
        self._agree()
        return PredictionOutput(done.predictions, done.labels, metrics)

    def _evaluate(self, *, is_scheduled: bool = True) -> dict[str, Any]:
        metrics = self.evaluate()
        if isinstance(self.lr_scheduler, ReduceLROnPlateau) and is_scheduled:
            self.lr_scheduler.step(self._watched(metrics))
        return metrics

    def _evaluated(self, dataset: Any, prefix: str, *, keeps: bool) -> tuple[Evaluated, dict[str, Any]]:
        begun_at = time.monotonic()
        stream = self._eval_stream(dataset)
        self._eval_loader, self._context = stream.loader, None
        with evaluating(self.model), torch.no_grad():
            done = evaluate(
                stream,
                step=lambda inputs: self.prediction_step(self.model, inputs, prediction_loss_only=not keeps),
                count=self._count,
                after_each=lambda: self._fire("on_prediction_step"),
                ranks=self._data_ranks,
                keeps=keeps,
            )
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and done.predictions is not None and done.labels is not None:
            metrics.update(plain(self.compute_metrics(EvalPrediction(done.predictions, done.labels))))
        if done.loss is not None:
            metrics["loss"] = done.loss
        metrics = {
            name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": each for name, each in metrics.items()
        }
        return done, metrics | _speed(prefix, time.monotonic() - begun_at, samples=done.samples, steps=done.steps)

    def _eval_stream(self, dataset: Any) -> Stream:
        """Kept for data sets that can be read again: workers may stay."""
        key = str(id(dataset)) if is_map_style(dataset) else ""
        if self._is_read_by_one:
            key = self.ranks.share(key)  # making one is collective, and only rank 0 has a data set to decide by
        if not key:
            return self._make_stream(dataset, is_training=False)
        if key not in self._eval_streams:
            self._eval_streams = {key: self._make_stream(dataset, is_training=False)}
        return self._eval_streams[key]

    def _count(self, batch: MicroBatch) -> float | torch.Tensor:
        return loss.weight_of(batch, shifts_labels=self._shifts_labels).to(self.device)

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
        predictions = outputs_without_loss(outputs, tuple(ignored))
        if self.preprocess_logits_for_metrics is not None:
            predictions = self.preprocess_logits_for_metrics(predictions, labels)
        return value, predictions, labels

    def _watched(self, metrics: Mapping[str, Any]) -> float:
        """The metric that the best model is chosen by."""
        name = str(self.args.metric_for_best_model)
        key = name if name.startswith("eval_") else f"eval_{name}"
        if key not in metrics:
            raise UsageError(
                f"{type(self.args).__name__}.metric_for_best_model={name!r}: none of the metrics {', '.join(metrics)}"
            )
        return float(metrics[key])

    def _is_best(self, metrics: Mapping[str, Any]) -> bool:
        if self.args.metric_for_best_model is None:
            return False
        value, best = self._watched(metrics), self.state.best_metric
        is_best = best is None or (value > best if self.args.greater_is_better else value < best)
        if is_best and not math.isnan(value):
            self.state.best_metric = value
            if self.args.save_strategy != "no":
                self.state.best_global_step = self.state.global_step
            return True
        return False


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _speed(prefix: str, runtime_s: float, *, samples: int, steps: int) -> dict[str, float]:
    seconds = max(runtime_s, 1e-9)
    return {
        f"{prefix}_runtime": round(runtime_s, 4),
        f"{prefix}_samples_per_second": round(samples / seconds, 3),
        f"{prefix}_steps_per_second": round(steps / seconds, 3),
    }
