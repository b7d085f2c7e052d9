"""Training loop from the first step to the summary, in the order in which it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..arguments import TrainingArguments
from .batches import MicroBatch
from .evaluation import is_best, speed, watched
from .optimization import Scheduler, learning_rate_of
from .outputs import TrainOutput
from .precision import Precision
from .run import TrainerRun
from .saver import Saver
from .stream import Stream

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainingLoop:
    """Loop of one training, whose model is ready to train.

    Args:
        args: settings of the run.
        run: progress and events of the run.
        stream: micro-batches of this rank.
        saver: saves and loads checkpoints.
        model: the model, wrapped for training.
        optimizer: its optimizer.
        scheduler: its learning rate schedule.
        precision: mixed precision and gradient clipping.
        accumulate: runs forward and backward of a step's micro-batches, and returns their loss, tokens and operations
            on this rank.
        evaluate: evaluates the data sets of the run and returns the metrics.
        log: appends to the history of the run and fires `on_log`.
        data_parallel_size: number of batches trained at once.
    """

    args: TrainingArguments
    run: TrainerRun
    stream: Stream
    saver: Saver
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    precision: Precision
    accumulate: Callable[[list[MicroBatch]], tuple[torch.Tensor, int, float]]
    evaluate: Callable[[], dict[str, Any]]
    log: Callable[[dict[str, Any]], None]
    data_parallel_size: int

    def train(self, begun_at: float) -> TrainOutput:
        """Train to the end. Collective.

        Args:
            begun_at: time at which the training began, by the monotonic clock.
        """
        run, begun_with = self.run, self.run.state.global_step
        run.begin()
        run.control.should_training_stop = run.control.should_abort_without_save = False
        run.fire("on_train_begin")
        run.agree()
        if self.args.eval_on_start and begun_with == 0:
            self.evaluate()
        while run.position.epoch < run.state.num_train_epochs:
            self._run_epoch()
            if run.control.should_training_stop:
                break
        return self._finish(begun_at, begun_with)

    def _run_epoch(self) -> None:
        run, position = self.run, self.run.position
        run.control.should_epoch_stop = False
        if position.rounds == 0:
            # Saved at the end of an epoch: the saved run had not fired on_epoch_begin, so callbacks draw now. Within an
            # epoch it had, so the random numbers are restored behind the event, in the branch below.
            self.saver.resume_random_numbers()
            self._make_up_evaluation()
        run.fire("on_epoch_begin")
        if not position.is_stopped:
            self.stream.open(position.epoch, skip=0 if self.args.ignore_data_skip else position.rounds)
            self.saver.resume_random_numbers()
            self._make_up_evaluation()
            self._run_steps()
        run.end_epoch()
        self._log_evaluate_save()

    def _run_steps(self) -> None:
        run = self.run
        has_data = run.position.rounds > 0
        # A run that resumes after its last step has no step to do; the flag that ended it is not part of a checkpoint.
        while not run.has_all_steps:
            batches = self.stream.take(self.args.gradient_accumulation_steps)
            if not batches:
                break
            has_data = True
            self._step(batches)
            if run.control.should_epoch_stop or run.control.should_training_stop:
                break
        if not has_data:
            step, epoch = run.state.global_step, run.position.epoch
            _log.warning("epoch %d has no data; training stops at step %d", epoch, step)
            run.control.should_training_stop = True

    def _step(self, batches: list[MicroBatch]) -> None:
        """Run one optimizer step, from its first micro-batch to the checkpoint after it."""
        run = self.run
        run.begin_step()
        step_loss, tokens, flos = self.accumulate(batches)
        norm = self.precision.clip(self.optimizer, self.model.parameters(), self.args.max_grad_norm)
        run.fire("on_pre_optimizer_step")
        was_made = self.precision.step(self.optimizer)
        run.fire("on_optimizer_step")  # before zero_grad: Hugging Face promises that the gradients still exist
        rate = learning_rate_of(self.optimizer)
        if was_made and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        self.model.zero_grad(set_to_none=True)
        run.record.add(step_loss, tokens=tokens, flos=flos)
        run.fire("on_train_metrics", metrics={"loss": step_loss, "grad_norm": norm, "tokens": tokens})
        run.end_step(rounds=len(batches), norm=norm, rate=rate, loss=step_loss)
        self._log_evaluate_save()

    def _log_evaluate_save(self) -> None:
        """Log, evaluate and save as the flags request, at the end of a step or epoch."""
        # Callbacks may set flags in every event, on any rank. The ranks agree after each event, because the next
        # branch is collective: a rank that took another branch would wait forever.
        run, saver, args = self.run, self.saver, self.args
        is_scheduled, run.is_scheduled = run.is_scheduled, False
        saver.report_durable()
        run.agree()
        if run.control.should_log and run.record.steps:
            self.log(run.logs_of_step())
            run.agree()
        if saver.is_ending() and not run.control.should_abort_without_save:
            saver.save_and_end()
        if run.control.should_evaluate:
            metrics = self.evaluate()
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(watched(args, metrics))
            is_best_so_far = is_best(args, metrics, run.state)
            if args.save_strategy == "best":
                run.control.should_save |= is_best_so_far  # a callback may have requested a save, too
            run.agree()
        is_cut_short = run.control.should_training_stop and not run.has_all_steps
        if is_cut_short and args.save_strategy != "no" and saver.begun_at != run.state.global_step:
            run.control.should_save = not run.control.should_abort_without_save
        if run.control.should_save:
            # Only a save that save_steps alone requests may be skipped while the writer is busy. An order to save that
            # falls on such a step sets `must_save` on one rank, and on all when they agree.
            is_last = run.control.should_training_stop or run.has_all_steps
            is_of_best = run.state.best_global_step == run.state.global_step
            saver.save(is_needed=is_last or is_of_best or run.control.must_save or not is_scheduled)
            run.agree()

    def _make_up_evaluation(self) -> None:
        if self.run.position.owes_evaluation:
            self.run.position.owes_evaluation = False
            self.run.control.should_evaluate = True
            self._log_evaluate_save()

    def _finish(self, begun_at: float, begun_with: int) -> TrainOutput:
        run, args = self.run, self.args
        self.saver.report_durable(waits=True)
        if run.record.steps:
            run.drain()
        best = run.state.best_model_checkpoint
        if args.load_best_model_at_end and best is not None:
            self.saver.load(best, only={"model"})
        steps = run.state.global_step - begun_with
        width = args.train_batch_size * args.gradient_accumulation_steps * self.data_parallel_size
        metrics: dict[str, Any] = {
            **speed("train", time.monotonic() - begun_at, samples=steps * width, steps=steps),
            "total_flos": run.state.total_flos,
            "train_loss": run.record.mean_of_run(),
        }
        self.log(metrics)
        run.agree()
        run.fire("on_train_end")
        run.agree()
        return TrainOutput(run.state.global_step, metrics["train_loss"], metrics)
