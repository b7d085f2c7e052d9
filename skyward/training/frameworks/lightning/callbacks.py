"""`LightningCallbacks`: our callbacks in Lightning's `Trainer`.

    trainer = lightning.Trainer(..., callbacks=[LightningCallbacks([JsonLogger(), DivergenceDetector()])])

Lightning differs from our `Trainer`, and the adapter compensates where it can:

- Batches: Lightning's batch events are those of micro-batches. A step begins with the first one after an optimizer
  step. It ends with the one that advances `global_step`; the others end with `on_substep_end`.
- Gradients: Lightning's `on_before_optimizer_step` precedes clipping. `on_pre_optimizer_step` follows it, because the
  adapter wraps the module's `configure_gradient_clipping` while `fit` runs. With manual optimization users clip before
  `step()`, so there Lightning's event is used. `on_optimizer_step` is the optimizer's post-hook.
- Logs: Lightning has no log event. The adapter logs every `logging_steps` steps: `loss` (the mean over the interval and
  all ranks), `grad_norm` before clipping, `learning_rate`, and values that the module logs during training. Values
  logged during validation are passed to `on_evaluate`, once, named `eval_...`.
- The validation before training (sanity check) is ignored.
- Order: an evaluation precedes the end of its epoch, and follows the requests of its step.
- Saves: `on_save` reports what `ModelCheckpoint` writes, with its path. A checkpoint that a callback requests is
  `<output_dir>/checkpoint-<step>.ckpt`, written by `trainer.save_checkpoint`; `fit(ckpt_path=...)` resumes it.
- Stop: `trainer.should_stop` after a checkpoint. Lightning stops once `min_epochs` and `min_steps` are reached.
- Abort: it ignores these minimums, removes every `ModelCheckpoint` for the rest of the fit, and disables validation.
- `should_evaluate` is not available and causes one warning: Lightning validates by its own cadence.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ....core.signatures import checked_options
from ...agree import Ranks
from ...bus import CallbackHandler
from ...parts import unwrapped
from ..foreign import plain, put
from ..run import CallbackRun, as_eval_metrics
from .package import lightning

_log = logging.getLogger(__name__)


if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback
else:
    Callback = lightning("callbacks").Callback


@checked_options
class LightningCallbacks(Callback):  # type: ignore[misc]  # its base is Any to mypy here
    """Callback of Lightning's `Trainer` that runs our callbacks. A trainer takes one, with all callbacks in it.

    Args:
        callbacks: instances or classes of `TrainerCallback`.
        output_dir: folder of checkpoints that callbacks request; None: the trainer's `default_root_dir`.
        logging_dir: `args.logging_dir` that callbacks see; None: `<output_dir>/logs`.
        logging_steps: optimizer steps between two logs, at least 1; None: the trainer's `log_every_n_steps`.
        save_at_stop: write a checkpoint before a stop.
        count_tokens: returns the number of tokens in a batch; None: the size of its `input_ids`, or 0 without them.
        ranks: ranks of the run; None: those of torch's process group.

    Raises:
        UsageError: an object is not a callback, or `logging_steps` is out of range.

    Example:
        Log to JSON and stop a diverged run of Lightning's Trainer::

            callbacks = LightningCallbacks([JsonLogger(), DivergenceDetector()], logging_steps=50)
            lightning.Trainer(max_epochs=3, callbacks=[callbacks]).fit(module, loader)
    """

    __module__ = "skyward.training"

    def __init__(
        self,
        callbacks: Iterable[object] = (),
        *,
        output_dir: str | os.PathLike[str] | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        logging_steps: int | None = None,
        save_at_stop: bool = True,
        count_tokens: Callable[[Any], int] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._run = CallbackRun(
            callbacks,
            output_dir=output_dir,
            logging_dir=logging_dir,
            logging_steps=logging_steps,
            saves_at_stop=save_at_stop,
            ranks=ranks,
        )
        self._count_tokens = count_tokens or _tokens_of
        self._fit: _Fit
        self._is_in_step = self._is_in_backward = False
        self._losses: list[Any] = []
        self._step_tokens = 0
        self._eval_names: set[str] = set()
        self._metrics_before: dict[str, Any] = {}

    @property
    def callbacks(self) -> CallbackHandler:
        """Our callbacks; `add` and `remove` change them."""
        return self._run.bus

    @property
    def state_key(self) -> str:
        return "skyward.training.LightningCallbacks"

    def state_dict(self) -> dict[str, Any]:
        return self._run.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._run.load_state_dict(state_dict)

    # A run -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._fit = _Fit(self._run, trainer, pl_module)
        self._run.meet(self._fit, output_dir=trainer.default_root_dir)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._fill(trainer)
        self._run.init_end()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._fill(trainer)
        steps = trainer.estimated_stepping_batches
        self._run.state.max_steps = self._run.args.max_steps = 0 if steps == float("inf") else int(steps)
        self._is_in_step = self._is_in_backward = False
        self._fit.attach()
        self._run.begin(global_step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")
        self._run.bus.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if "_fit" in vars(self):  # missing if Lightning refused its arguments before `setup`
            self._fit.detach()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._run.state.epoch = float(trainer.current_epoch)
        self._run.fire("on_epoch_begin")
        self._run.settle()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        epoch = self._run.state.epoch or 0.0
        batches = trainer.num_training_batches
        self._run.epoch_end(epoch if batches != float("inf") else trainer.current_epoch + 1.0)

    # A step ----------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._is_in_step:
            self._is_in_step, self._losses, self._step_tokens = True, [], 0
            self._run.step_begin()
        tokens = self._count_tokens(batch)
        self._step_tokens += tokens
        self._run.add_loss(tokens=tokens)
        self._is_in_backward = True
        self._run.fire("on_forward_backward_begin")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._is_in_backward:
            self._is_in_backward = False
            self._run.fire("on_forward_backward_end")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        wanted = (trainer.global_step + 1) % self._run.state.logging_steps == 0
        if wanted or self._run.bus.listens("on_train_metrics"):
            self._fit.grad_norm = _norm(optimizer)
        if not pl_module.automatic_optimization:
            self._run.fire("on_pre_optimizer_step")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.on_after_backward(trainer, pl_module)  # where the module skipped it
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None and hasattr(loss, "detach"):
            # Lightning has divided the loss by the micro-batches of a step, for the gradients' sake.
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._losses.append(loss.detach() * parts)
        if trainer.global_step == self._run.state.global_step:
            self._run.fire("on_substep_end")
            return
        self._is_in_step = False
        mean = sum(self._losses) / len(self._losses) if self._losses else None
        self._run.add_loss(loss=mean)
        if self._run.bus.listens("on_train_metrics"):
            metrics = {"loss": mean, "grad_norm": self._fit.grad_norm, "tokens": self._step_tokens}
            self._run.fire("on_train_metrics", metrics=metrics)
        batches = trainer.num_training_batches
        part = 0.0 if batches == float("inf") else (batch_idx + 1) / batches
        self._run.step_end(global_step=trainer.global_step, epoch=trainer.current_epoch + part)

    # Evaluation ------------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._metrics_before = dict(trainer.callback_metrics)
        self._run.evaluation_begins()

    def on_validation_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if not trainer.sanity_checking:
            self._run.fire("on_prediction_step")

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        # Lightning keeps numbers of training and validation in one dict. A validation changes only its own ones.
        now, before = dict(trainer.callback_metrics), self._metrics_before
        self._eval_names |= {name for name, value in now.items() if name not in before or _differ(before[name], value)}
        self._fit.eval_names = self._eval_names
        if not trainer.sanity_checking:
            metrics = {name: value for name, value in now.items() if name in self._eval_names}
            self._run.evaluated(as_eval_metrics(metrics))

    def evaluated_beside(self, metrics: Mapping[str, Any], *, step: int, epoch: float) -> None:
        """Report an asynchronous validation of `skyward.training.sakura`.

        Args:
            metrics: its metrics.
            step: the step whose weights were validated.
            epoch: epochs trained at that step.
        """
        self._eval_names |= set(metrics)
        self._fit.eval_names = self._eval_names
        self._run.evaluated_beside(as_eval_metrics(metrics), step=step, epoch=epoch)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.fire("on_predict", metrics=as_eval_metrics(trainer.callback_metrics, prefix="test_"))
        self._run.bus.agree(self._run.control)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        self._run.fire("on_predict", metrics={})
        self._run.bus.agree(self._run.control)

    # Within ----------------------------------------------------------------------------------------------------------

    def _fill(self, trainer: Any) -> None:
        """Fill `args` and `state` with Lightning's settings."""
        args, state = self._run.args, self._run.state
        state.logging_steps = args.logging_steps = self._run.logging_steps or max(1, trainer.log_every_n_steps)
        epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else 0
        args.num_train_epochs = state.num_train_epochs = epochs
        args.gradient_accumulation_steps = trainer.accumulate_grad_batches
        args.eval_strategy = "epoch" if trainer.enable_validation else "no"
        if args.eval_strategy == "epoch" and trainer.val_check_interval != 1.0:
            # val_check_interval counts batches within an epoch, which is no cadence in optimizer steps.
            args.eval_strategy, state.eval_steps = "steps", 0
        args.save_strategy = "epoch" if trainer.checkpoint_callback is not None else "no"
        args.disable_tqdm = trainer.progress_bar_callback is None
        args.resume_from_checkpoint = trainer.ckpt_path
        args.per_device_train_batch_size = getattr(trainer.train_dataloader, "batch_size", None)
        state.train_batch_size = args.per_device_train_batch_size


class _Fit:
    """`Framework` of Lightning for one fit."""

    def __init__(self, run: CallbackRun, trainer: Any, module: Any) -> None:
        self._run, self._trainer, self._module = run, trainer, module
        self.grad_norm: Any = None
        self.eval_names: set[str] = set()
        self._learning_rate: float | None = None
        self._undo = ExitStack()
        self._has_warned = False

    def context(self, event: str) -> dict[str, Any]:
        trainer = self._trainer
        schedulers = [lr_scheduler_config.scheduler for lr_scheduler_config in trainer.lr_scheduler_configs]
        return {
            "model": unwrapped(self._module),
            "optimizer": trainer.optimizers[0] if trainer.optimizers else None,
            "lr_scheduler": schedulers[0] if schedulers else None,
            "train_dataloader": trainer.train_dataloader,
            "eval_dataloader": trainer.val_dataloaders,
            "trainer": trainer,
        }

    def logs(self) -> dict[str, Any]:
        logs: dict[str, Any] = {}
        if self.grad_norm is not None:
            logs["grad_norm"], self.grad_norm = plain(self.grad_norm), None
        if self._learning_rate is not None:
            logs["learning_rate"] = self._learning_rate
        for name, value in self._trainer.callback_metrics.items():
            if name not in self.eval_names and name != "loss":
                logs[name] = plain(value)
        return logs

    def save(self, folder: str, step: int) -> None:
        path = os.path.join(folder, f"checkpoint-{step}.ckpt")
        self._trainer.save_checkpoint(path, weights_only=False)  # wrapped by `attach`, which calls `saved`

    def stop(self) -> None:
        self._trainer.should_stop = True

    def abort(self) -> None:
        trainer, loop = self._trainer, self._trainer.fit_loop
        put(self._undo, trainer, "limit_val_batches", 0)
        put(self._undo, loop, "min_epochs", None)
        put(self._undo, loop.epoch_loop, "min_steps", None)
        trainer.should_stop = True
        # Lightning puts checkpoint callbacks last, so none of them has seen this event yet. The list is changed in
        # place, because Lightning is iterating over it.
        removed = [
            callback
            for callback in trainer.callbacks
            if any(kind.__name__ == "Checkpoint" for kind in type(callback).__mro__)
        ]
        trainer.callbacks[:] = [callback for callback in trainer.callbacks if callback not in removed]
        self._undo.callback(trainer.callbacks.extend, removed)

    def stop_epoch(self) -> None:
        self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True

    def evaluate(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "should_evaluate ignored: Lightning validates by its own cadence; use Trainer(val_check_interval=)"
            )

    def attach(self) -> None:
        """Add the events that Lightning lacks, until `detach`: gradients clipped, step taken, checkpoint written."""
        self.detach()
        run, trainer, module = self._run, self._trainer, self._module

        def configure_gradient_clipping(*args: Any, **kwargs: Any) -> None:
            clip(*args, **kwargs)
            run.fire("on_pre_optimizer_step")

        def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> None:
            save(filepath, *args, **kwargs)
            self._note_best()
            run.saved(os.fspath(filepath))

        def stepped(optimizer: Any, *_: Any) -> None:
            self._learning_rate = float(optimizer.param_groups[0]["lr"])  # of this step: schedulers step later
            run.fire("on_optimizer_step")

        clip = put(self._undo, module, "configure_gradient_clipping", configure_gradient_clipping)
        save = put(self._undo, trainer, "save_checkpoint", save_checkpoint)
        for optimizer in trainer.optimizers:
            self._undo.callback(optimizer.register_step_post_hook(stepped).remove)

    def detach(self) -> None:
        """Restore all wrapped objects. Idempotent."""
        self._undo.close()

    def _note_best(self) -> None:
        best: Any = self._trainer.checkpoint_callback
        score: Any = getattr(best, "best_model_score", None)
        if score is not None and best.best_model_path:
            state = self._run.state
            if state.best_model_checkpoint != best.best_model_path:
                state.best_global_step = state.global_step
            state.best_metric, state.best_model_checkpoint = float(score), best.best_model_path


def _tokens_of(batch: Any) -> int:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return int(ids.numel()) if ids is not None and hasattr(ids, "numel") else 0


def _norm(optimizer: Any) -> Any:
    """Return the norm of all gradients as a tensor, without waiting for the device; None without gradients."""
    import torch

    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not gradients:
        return None
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(gradient.detach()) for gradient in gradients])
    )


def _differ(before: Any, after: Any) -> bool:
    return before is not after and not bool((before == after).all())
