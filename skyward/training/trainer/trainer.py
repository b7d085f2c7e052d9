"""A PyTorch training loop that fires every event, agrees with its other ranks, and resumes to the bit.

Names, defaults, cadence and the order of events are those of Hugging Face's Trainer, which it does not import. What
differs is said where it does. `train` reads from top to bottom; what it is made of, what it minimises, how it
evaluates and what it keeps stand in the modules of its base classes.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...errors import UsageError
from ..checkpoint.rng import seed_everything
from ..checkpoint.termination import Termination
from . import flow, loss
from .activations import checkpoint_activations
from .assembly import Position
from .batches import MicroBatch
from .checkpointing import Checkpointing
from .optimization import Scheduler, learning_rate_of, make_optimizer, make_scheduler
from .outputs import TrainOutput
from .record import Record
from .saves import Saves
from .scoring import Scoring, speed
from .stream import Stream
from .world import accumulating, wrap

__all__ = ["Trainer"]

_log = logging.getLogger(__name__)


class Trainer(Scoring, Checkpointing):
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

    def train(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None = None) -> TrainOutput:
        """Trains to the end, from the beginning or from a checkpoint.

        resume_from_checkpoint: as in TrainingArguments, whose value counts where this is None.

        A run that goes on gives what it would have given without the interruption: the same batches, losses and logs,
        if the data set gives the same rows.
        """
        begun_at, begun_with = time.monotonic(), self._prepare(resume_from_checkpoint)
        try:
            if self.args.enable_jit_checkpoint:
                self._termination.open(hears_provider=True)
            return self._train(begun_at, begun_with)
        finally:
            self._termination.close()
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
        path, parts = self._checkpoint_to_resume(resume_from_checkpoint)
        seed_everything((self.args.seed + self.ranks.rank) % 2**32)
        self.state = self._new_state()
        self.state.epoch = 0.0
        self._position = Position()
        self._saves = Saves(self.checkpoints, self.args)
        self._termination = Termination(grace_s=self.args.jit_checkpoint_grace_s, option="enable_jit_checkpoint")
        self._record = Record(self.ranks, self.device, filters=self.args.logging_nan_inf_filter)
        if self.train_dataset is None and self._reads:
            raise UsageError("Trainer.train: needs a train_dataset")
        self._stream = self._make_stream(self.train_dataset, is_training=True)
        self._set_length(self._stream.rounds)
        self._prepare_model()
        if path is not None:
            self._load(path, skip={"rng"}, parts=parts)
            self._pending_rng = path, parts
        # What the arguments say now holds, not what they said when the checkpoint was made.
        self._set_length(self._stream.rounds)
        self.model.train()
        self._context = self._last_loss = None
        return self.state.global_step

    def _prepare_model(self) -> None:
        checkpoint_activations(self.model, self.args)
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

    # Steps -----------------------------------------------------------------------------------------------------------

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
        self._last_step, self._last_loss = (norm, rate), step_loss
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
        if self._is_terminated() and not self.control.should_abort_without_save:
            self._save_and_go()
        if self.control.should_evaluate:
            is_best = self._is_best(self._evaluate())
            if self.args.save_strategy == "best":
                self.control.should_save |= is_best  # a callback may have asked for it, too
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
            **speed("train", runtime, samples=steps * width, steps=steps),
            "total_flos": self.state.total_flos,
            "train_loss": self._record.mean_of_run(),
        }
        self.log(metrics)
        self._agree()
        self._fire("on_train_end")
        self._agree()
        return TrainOutput(self.state.global_step, metrics["train_loss"], metrics)
