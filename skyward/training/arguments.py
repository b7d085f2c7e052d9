"""What a training run is told: Hugging Face's names and defaults, where it has them, checked when they are given.

No framework is imported here. Where ours differ from Hugging Face's of the same name, the field says so.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import UsageError
from .legal_arguments import CHOICES, RULES, options_of, types_of

__all__ = ["DDPTrainingArguments", "TrainingArguments"]

_NOT_IN_DIGEST = frozenset({"output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "disable_tqdm"})


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """The settings of a run. Paths may be given as `Path`; they are kept as text.

    `*_steps` count optimizer steps; below 1 they are a share of all steps. `-1` in max_steps: by num_train_epochs.

    Raises: UsageError, which names the field, its value and the legal range.
    """

    output_dir: str | os.PathLike[str] | None = field(default=None, kw_only=False)
    """Checkpoints are `output_dir/checkpoint-<step>`. None: `trainer_output` in the working folder. The one argument
    that may come without its name, as in Hugging Face's."""
    logging_dir: str | os.PathLike[str] | None = None
    """What loggers write. None: `output_dir/logs`."""
    run_name: str | None = None
    """What loggers of Hugging Face's that keep runs by name call this one. Ours do not look at it."""

    # How long, and how fast
    num_train_epochs: float = 3.0
    max_steps: int = -1
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    warmup_steps: float = 0
    optim: str = "adamw_torch_fused"
    optim_args: str | None = None
    """Further options of the optimizer, "momentum=0.9, nesterov=true". sgd: momentum, dampening, nesterov; adagrad:
    lr_decay, eps; rmsprop: momentum, alpha, eps, centered. Unlike Hugging Face's, others are refused, not ignored."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0: they are not, and the norm is still logged."""
    label_smoothing_factor: float = 0.0
    """So much of each label's weight is shared by all classes, in evaluation too. Labels are numbers of classes, and
    the model gives its logits as "logits", first or alone. Does nothing where `compute_loss_func` is given."""
    average_tokens_across_devices: bool = True
    """Whether a token of one rank counts as much as one of another where their numbers differ."""
    bf16: bool = False
    fp16: bool = False
    activation_checkpointing: bool | None = None
    """Compute activations once more in the backward pass instead of keeping them, by the model's own
    `activation_checkpointing_enable` or `gradient_checkpointing_enable`, which Hugging Face's have."""
    activation_checkpointing_kwargs: Mapping[str, Any] | None = None
    """What these are given; `every_n_layers` and `offload` by name, the rest for `torch.utils.checkpoint`."""
    gradient_checkpointing: bool | None = None
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None
    """The older names of the two above, which win where both are given."""
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None

    # What is logged, evaluated and saved, and when
    logging_strategy: str = "steps"
    logging_steps: float = 500
    logging_first_step: bool = False
    logging_nan_inf_filter: bool = True
    """Steps whose loss is not finite are left out of the logged mean. Unlike Hugging Face's, a logged interval without
    one finite loss is shown as it is: a run that has diverged must not look as if it had not."""
    include_num_input_tokens_seen: bool | str = "no"
    eval_strategy: str = "no"
    eval_steps: float | None = None
    eval_delay: float = 0
    eval_on_start: bool = False
    per_device_eval_batch_size: int = 8
    prediction_loss_only: bool = False
    eval_accumulation_steps: int | None = None
    """Predictions go to the CPU after so many batches. None: after each, where Hugging Face's keeps all on the device
    to the end."""
    save_strategy: str = "steps"
    save_steps: float = 500
    save_total_limit: int | None = None
    save_only_model: bool = False
    save_on_each_node: bool = False
    """Nodes share no disk: each node keeps its own copy of each checkpoint."""
    async_save: bool = False
    """Write checkpoints behind training, which waits only while the states are copied. `on_save` then comes at the step
    at which the checkpoint is durable, as does an error of the save."""
    save_on_busy: str = "wait"
    """What an asynchronous save does while the one before it is being written: "wait" for it, or "skip": it is left
    out. The best, the last and what a callback or a command asks for are never left out."""
    enable_jit_checkpoint: bool = False
    """On SIGTERM of any rank, or when the provider of its machine announces that it takes it back: all ranks save after
    the step that they are in, and `train` raises RunTerminated, which ends the process with 143."""
    jit_checkpoint_grace_s: float = 25.0
    """How long after the signal that save may take. Give less than the scheduler gives before it kills."""
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    resume_from_checkpoint: bool | str | os.PathLike[str] | None = None
    """A checkpoint's folder; True: the newest in output_dir, which there must be; "auto": the newest, if there is one,
    which is what a job wants that may be started again."""
    ignore_data_skip: bool = False
    report_to: str | tuple[str, ...] | list[str] | None = "none"
    """"none" only, or nothing: what reports is a callback here, TBLogger for one."""

    # Data
    dispatch_batches: bool | None = None
    """Whether rank 0 reads for all ranks. None: where the data set is an iterable, which no one can share out. False
    with an iterable: every rank reads the one that it was given, whole."""
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    dataloader_multiprocessing_context: str | None = None
    train_sampling_strategy: str = "random"
    remove_unused_columns: bool = True
    label_names: tuple[str, ...] | list[str] | None = None

    # The world
    seed: int = 42
    data_seed: int | None = None
    full_determinism: bool = False
    """Only algorithms of torch that give the same again, for this process from then on; what has none raises."""
    use_cpu: bool = False
    disable_tqdm: bool | None = None
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None
    ddp_static_graph: bool | None = None

    do_eval: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._check_types()
        self._normalise()
        for name, (is_legal, legal) in RULES.items():
            value = getattr(self, name)
            if not is_legal(value):
                raise UsageError(f"{type(self).__name__}.{name}={value!r}: must be {legal}")
        options_of(self.optim, self.optim_args, arguments=type(self).__name__)
        self._derive()
        self._check_combinations()

    def _check_types(self) -> None:
        """A flag that is text is true, also "false": what comes out of a file must not turn things on."""
        for name, (kinds, legal) in types_of(type(self)).items():
            value = getattr(self, name)
            reports = name == "report_to" and value not in ("none", None, [], ())
            if not isinstance(value, kinds) or reports:
                raise UsageError(f"{type(self).__name__}.{name}={value!r}: must be {legal}")

    def _normalise(self) -> None:
        output_dir = os.path.expanduser(os.fspath(self.output_dir if self.output_dir is not None else "trainer_output"))
        logging_dir = self.logging_dir if self.logging_dir is not None else os.path.join(output_dir, "logs")
        self._set("output_dir", output_dir)
        self._set("logging_dir", os.path.expanduser(os.fspath(logging_dir)))
        if isinstance(self.resume_from_checkpoint, os.PathLike):
            self._set("resume_from_checkpoint", os.fspath(self.resume_from_checkpoint))
        if isinstance(self.include_num_input_tokens_seen, bool):
            self._set("include_num_input_tokens_seen", "all" if self.include_num_input_tokens_seen else "no")
        for name in ("activation_checkpointing", "activation_checkpointing_kwargs"):
            older = name.replace("activation", "gradient")
            value = getattr(self, name) if getattr(self, name) is not None else getattr(self, older)
            value = bool(value) if name == "activation_checkpointing" else value
            self._set(name, value)
            self._set(older, value)
        self._set("report_to", [])
        for name in CHOICES:
            value = getattr(self, name)
            self._set(name, getattr(value, "value", value))  # Hugging Face's enums have text as values

    def _derive(self) -> None:
        if self.eval_strategy == "steps" and not self.eval_steps:
            self._set("eval_steps", self.logging_steps)
        needs_metric = self.load_best_model_at_end or self.lr_scheduler_type == "reduce_lr_on_plateau"
        if self.metric_for_best_model is None and (needs_metric or self.save_strategy == "best"):
            self._set("metric_for_best_model", "loss")
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self._set("greater_is_better", not self.metric_for_best_model.endswith("loss"))
        self._set("do_eval", self.eval_strategy != "no")
        for name in ("logging_steps", "eval_steps", "save_steps"):
            value = getattr(self, name)
            if value is not None and value >= 1:
                self._set(name, int(value))

    def _check_combinations(self) -> None:
        name = type(self).__name__
        if self.fp16 and self.bf16:
            raise UsageError(f"{name}: fp16=True and bf16=True: at most one of them")
        if self.dataloader_num_workers == 0 and self.dataloader_prefetch_factor is not None:
            raise UsageError(f"{name}.dataloader_prefetch_factor={self.dataloader_prefetch_factor}: needs workers, set "
                             "dataloader_num_workers to 1 or more")  # fmt: skip
        needs_eval = self.save_strategy == "best" or self.lr_scheduler_type == "reduce_lr_on_plateau"
        if needs_eval and self.eval_strategy == "no":
            raise UsageError(f"{name}.eval_strategy='no': save_strategy='best' and "
                             "lr_scheduler_type='reduce_lr_on_plateau' need 'steps' or 'epoch'")  # fmt: skip
        if self.load_best_model_at_end and self.save_strategy != "best":
            self._check_best()

    def _check_best(self) -> None:
        """The best model can be loaded only if the steps that are evaluated are saved, too."""
        name = f"{type(self).__name__}.load_best_model_at_end=True"
        if self.eval_strategy != self.save_strategy:
            raise UsageError(
                f"{name}: needs save_strategy ({self.save_strategy!r}) and eval_strategy ({self.eval_strategy!r}) to "
                "be the same, or save_strategy='best'"
            )
        if self.eval_strategy != "steps":
            return
        every, evaluated = self.save_steps, self.eval_steps or self.logging_steps
        quotient = every / evaluated
        if (every < 1) != (evaluated < 1) or not math.isclose(quotient, round(quotient), rel_tol=1e-6):
            raise UsageError(f"{name}: needs save_steps ({every}) to be a multiple of eval_steps ({evaluated})")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON has them. This and the next two are what Hugging Face's integrations call."""
        return {each.name: _as_json(getattr(self, each.name)) for each in fields(self)}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Numbers, flags and text only."""
        return {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in self.to_dict().items()
        }

    def digest(self) -> str:
        """Hash of the settings that change what a run computes: its paths and names are left out. It is the
        `training_args_hash` of checkpoints, so two of one run have the same.
        """
        settings = {name: value for name, value in self.to_dict().items() if name not in _NOT_IN_DIGEST}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]

    def warmup_steps_of(self, max_steps: int) -> int:
        """How many of `max_steps` steps the learning rate rises."""
        return int(self.warmup_steps) if self.warmup_steps >= 1 else math.ceil(max_steps * self.warmup_steps)

    @property
    def train_batch_size(self) -> int:
        """Of one rank, in one micro-batch."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Of one rank."""
        return self.per_device_eval_batch_size


@dataclass(frozen=True, kw_only=True)
class DDPTrainingArguments(TrainingArguments):
    """Of a `DDPTrainer`. Rank 0 reads the data and hands it out; `dispatch_batches=False`: every rank reads its own."""

    dispatch_batches: bool | None = True


def _as_json(value: Any) -> Any:
    """Paths and mappings in settings are the caller's own kinds."""
    if isinstance(value, Mapping):
        return {str(name): _as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
