"""What a Trainer is made of before it trains: model, data, ranks, callbacks, and the position of its run.

Trainers of models in other shapes override how their ranks lie and what is made of the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..agree import Ranks, ranks_of_this_process
from ..arguments import TrainingArguments
from ..bus import CallbackHandler
from ..checkpoint import Checkpoints, FileCheckpoints
from ..checkpoint.rng import seed_everything
from ..events import TrainerControl, TrainerState
from . import loss
from .collate import Collator, Inputs, columns_of
from .defaults import with_defaults
from .determinism import make_deterministic
from .evaluation import plain
from .optimization import Scheduler
from .outputs import EvalPrediction
from .parts import CheckpointParts
from .precision import Precision
from .reading import has_length
from .record import Record
from .saves import Saves
from .smoothing import smoothing_of
from .stream import Stream, make_stream
from .world import check_data_parallel, device_of, place, unwrap

__all__ = ["Assembly", "Position"]


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


class Assembly:
    """The parts of a `Trainer`, as it says what they are, and how it speaks to its callbacks."""

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
        self.data_collator = Collator(
            data_collator, self._columns_to_keep() if self.args.remove_unused_columns else None, self._inputs()
        )
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
        self._pending_rng: tuple[str, CheckpointParts] | None = None
        self._is_scheduled = False  # whether the cadence asks for the save that is asked for
        self._weights: int | None = None  # parameters but for tables of embeddings, counted when needed
        self._is_compiled = self._has_begun = False
        self._saves = Saves(self.checkpoints, self.args)
        self._counts_itself = loss.takes_num_items(self.model if compute_loss_func is None else compute_loss_func)
        self._shifts_labels = loss.shifts_labels(self.model)
        self._smoothing = smoothing_of(self.model, self.args, is_given_a_loss=self.compute_loss_func is not None)
        self._check()

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

    def _inputs(self) -> Inputs:
        """What a batch must have something of."""
        return Inputs.of(self.model, self.args.label_names, who=type(self).__name__)

    def _make_device(self) -> torch.device:
        device = device_of(self.args, self.ranks)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # collectives, the profiler and counts of memory go by the current one
        return device

    def _make_precision(self) -> Precision:
        return Precision(self.args, self.device)

    def _check(self) -> None:
        check_data_parallel(self.model, self.ranks, trainer=type(self).__name__)
        args, name = self.args, type(self.args).__name__
        if args.eval_strategy != "no" and self.eval_dataset is None and self._reads:
            raise UsageError(f"{name}.eval_strategy={args.eval_strategy!r}: needs an eval_dataset, or 'no'")
        if self.train_dataset is not None and not has_length(self.train_dataset) and args.max_steps <= 0:
            raise UsageError(
                f"{name}.max_steps={args.max_steps}: the train_dataset has no length, so nobody knows when an epoch "
                "ends; say how many steps, above 0"
            )

    # What is made when it is needed ----------------------------------------------------------------------------------

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

    def _begin(self) -> None:
        """Tells the callbacks once that the trainer is made; a resumed run's states are loaded by then."""
        if not self._has_begun:
            self._has_begun = True
            self._fire("on_init_end")
            self._agree()

    def log(self, logs: dict[str, Any]) -> None:
        """Appends to the state's log_history, and tells the callbacks. `epoch` is added."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.control.should_log = False
        self.state.log_history.append({**plain(logs), "step": self.state.global_step})
        self._fire("on_log", logs=logs)


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
