"""Arguments of a training run, checked on construction. No framework is imported here."""

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

_NOT_IN_DIGEST = frozenset({"output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "disable_tqdm"})


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """Settings of a training run, checked on construction.

    Names and defaults are those of Hugging Face's `TrainingArguments`, where it has the field. A field whose meaning
    differs says so. Instances are frozen; `dataclasses.replace` makes a changed copy.

    `logging_steps`, `eval_steps`, `save_steps` and `warmup_steps` count optimizer steps. A value below 1 is a share of
    all steps. A run ends after `max_steps` steps, or after `num_train_epochs` epochs if `max_steps` is -1.

    Raises:
        UsageError: a value has the wrong type, is out of range, or contradicts another one. The message names the
            field, its value and the legal range.

    Example:
        >>> from skyward.training import TrainingArguments
        >>> args = TrainingArguments("out", max_steps=1000, warmup_steps=0.1, eval_strategy="steps", eval_steps=250)
        >>> args.warmup_steps_of(args.max_steps)
        100
    """

    output_dir: str | os.PathLike[str] | None = field(default=None, kw_only=False)
    """Folder of the run; checkpoints are `output_dir/checkpoint-<step>`. None: `trainer_output` in the working folder.

    The only argument that may be positional, as in Hugging Face's class. A `Path` is converted to text."""
    logging_dir: str | os.PathLike[str] | None = None
    """Folder for loggers that read it from the arguments. None: `output_dir/logs`."""
    run_name: str | None = None
    """Name of the run in Hugging Face's experiment loggers. Our loggers ignore it."""

    # How long, and how fast
    num_train_epochs: float = 3.0
    """Epochs to train, above 0; a fraction is allowed. Ignored if `max_steps` is set."""
    max_steps: int = -1
    """Optimizer steps to train, above 0. -1: train `num_train_epochs` epochs."""
    per_device_train_batch_size: int = 8
    """Samples in one micro-batch of one rank, at least 1."""
    gradient_accumulation_steps: int = 1
    """Micro-batches in one optimizer step, at least 1."""
    learning_rate: float = 5e-5
    """Learning rate after the warmup, at least 0."""
    lr_scheduler_type: str = "linear"
    """Learning rate schedule.

    One of "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "constant",
    "constant_with_warmup", "inverse_sqrt", "warmup_stable_decay", "reduce_lr_on_plateau"."""
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    """Options of the schedule, such as `{"num_cycles": 2}` for "cosine_with_restarts"."""
    warmup_steps: float = 0
    """Steps over which the learning rate rises from 0: a whole number, or a share of all steps below 1."""
    optim: str = "adamw_torch_fused"
    """Optimizer: "adamw_torch", "adamw_torch_fused", "sgd", "adagrad" or "rmsprop"."""
    optim_args: str | None = None
    """Further options of the optimizer, such as "momentum=0.9, nesterov=true".

    sgd: momentum, dampening, nesterov; adagrad: lr_decay, eps; rmsprop: momentum, alpha, eps, centered. Unlike Hugging
    Face's, an option that the optimizer does not take is an error."""
    weight_decay: float = 0.0
    """Weight decay of all parameters except biases and norms, at least 0."""
    adam_beta1: float = 0.9
    """First AdamW beta, from 0 to below 1."""
    adam_beta2: float = 0.999
    """Second AdamW beta, from 0 to below 1."""
    adam_epsilon: float = 1e-8
    """AdamW epsilon, at least 0."""
    max_grad_norm: float = 1.0
    """Norm to which larger gradients are scaled down. 0: no clipping; the norm is still logged."""
    label_smoothing_factor: float = 0.0
    """Share of each label's weight that is spread over all classes, from 0 to 1; evaluation uses it too.

    Labels must be class indices, and the model must return logits as "logits" or as its first output. Ignored with a
    warning if the trainer has a `compute_loss_func`."""
    average_tokens_across_devices: bool = True
    """Weigh every token alike across ranks. False: weigh every rank alike, however many tokens it has."""
    bf16: bool = False
    """Autocast to bfloat16, in evaluation too. Excludes `fp16`."""
    fp16: bool = False
    """Autocast to float16 with a scaled loss, in evaluation too. Excludes `bf16`."""
    activation_checkpointing: bool | None = None
    """Recompute activations in the backward pass to save memory. None: False.

    Calls the model's `activation_checkpointing_enable` or `gradient_checkpointing_enable`; Hugging Face's models have
    the latter."""
    activation_checkpointing_kwargs: Mapping[str, Any] | None = None
    """Options of that call: `every_n_layers` and `offload` by name, the rest for `torch.utils.checkpoint`."""
    gradient_checkpointing: bool | None = None
    """Older name of `activation_checkpointing`, which takes precedence."""
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None
    """Older name of `activation_checkpointing_kwargs`, which takes precedence."""
    torch_compile: bool = False
    """Compile the model with `torch.compile`."""
    torch_compile_backend: str | None = None
    """Backend of `torch.compile`. None: "inductor"."""
    torch_compile_mode: str | None = None
    """Mode of `torch.compile`, such as "reduce-overhead". None: torch's default."""

    # Logging, evaluation and checkpoints
    logging_strategy: str = "steps"
    """When to log: "no", "steps" (every `logging_steps`) or "epoch"."""
    logging_steps: float = 500
    """Steps between two logs: a whole number of at least 1, or a share of all steps below 1."""
    logging_first_step: bool = False
    """Log the first step too."""
    logging_nan_inf_filter: bool = True
    """Leave steps with a loss that is not finite out of the logged mean.

    Unlike Hugging Face's, an interval without any finite loss logs NaN, so that a diverged run is visible."""
    include_num_input_tokens_seen: bool | str = "no"
    """Log the tokens seen so far, padding included: "no", "all" or "non_padding"; True means "all"."""
    eval_strategy: str = "no"
    """When to evaluate during training: "no", "steps" (every `eval_steps`) or "epoch"."""
    eval_steps: float | None = None
    """Steps between two evaluations: a whole number of at least 1, or a share below 1. None: `logging_steps`."""
    eval_delay: float = 0
    """Time before the first evaluation, at least 0: in steps or epochs, as `eval_strategy` counts."""
    eval_on_start: bool = False
    """Evaluate before the first step of a new run."""
    per_device_eval_batch_size: int = 8
    """Samples in one evaluation batch of one rank, at least 1."""
    prediction_loss_only: bool = False
    """Return only the loss from evaluations and predictions, and skip `compute_metrics`."""
    eval_accumulation_steps: int | None = None
    """Batches after which predictions move to the CPU, at least 1. None: after each batch.

    Unlike ours, Hugging Face's None keeps all predictions on the device until the end."""
    save_strategy: str = "steps"
    """When to save a checkpoint: "no", "steps" (every `save_steps`), "epoch" or "best" (on a new best metric)."""
    save_steps: float = 500
    """Steps between two checkpoints: a whole number of at least 1, or a share of all steps below 1."""
    save_total_limit: int | None = None
    """Newest checkpoints to keep, at least 1; the best one is kept in addition. None: keep all."""
    save_only_model: bool = False
    """Save the model without optimizer, schedule and position. Such a checkpoint cannot resume a run."""
    save_on_each_node: bool = False
    """Keep a copy of each checkpoint on every node, for nodes that share no disk."""
    async_save: bool = False
    """Write checkpoints in the background; training waits only while the states are copied.

    `on_save` is called at the step at which the checkpoint is durable. A failed save raises at that step, too."""
    save_on_busy: str = "wait"
    """Behavior of an asynchronous save while the one before it is still being written: "wait" for it, or "skip".

    Never skipped: the best checkpoint, the last one, and those that a callback or a command asks for."""
    enable_jit_checkpoint: bool = False
    """Save after the current step on SIGTERM of any rank, or when the provider announces that it reclaims a machine.

    `train` then raises RunTerminated on all ranks, which ends the process with status 143."""
    jit_checkpoint_grace_s: float = 25.0
    """Seconds that this save may take, above 0. Set less than the scheduler's delay between SIGTERM and SIGKILL."""
    load_best_model_at_end: bool = False
    """Load the weights of the best checkpoint when training ends."""
    metric_for_best_model: str | None = None
    """Metric that decides which checkpoint is best, with or without "eval_". None: "loss", where one is needed."""
    greater_is_better: bool | None = None
    """Whether a larger value of that metric is better. None: True unless its name ends with "loss"."""
    resume_from_checkpoint: bool | str | os.PathLike[str] | None = None
    """Checkpoint from which to resume: a folder, True or "auto". None or False: start a new run.

    True: the newest one in `output_dir`; there must be one. "auto": the newest one if there is one, which suits a job
    that may be restarted."""
    ignore_data_skip: bool = False
    """Resume at the first batch of the epoch instead of the batch after the checkpoint."""
    report_to: str | tuple[str, ...] | list[str] | None = "none"
    """Accepted for compatibility; only "none", None or an empty list. Pass loggers such as `TBLogger` as callbacks."""

    # Data
    dispatch_batches: bool | None = None
    """Let rank 0 read the data and send every rank its batches.

    None: only if ranks cannot share the data by index: an iterable, or a DataLoader without a DistributedSampler. False
    with an iterable: every rank reads all of its own iterable."""
    dataloader_drop_last: bool = False
    """Drop the last batches of an epoch if they are not full on every rank."""
    dataloader_num_workers: int = 0
    """Processes of each rank that load data, at least 0. 0: load in the training process."""
    dataloader_pin_memory: bool = True
    """Copy batches to pinned memory; only on GPUs."""
    dataloader_persistent_workers: bool = False
    """Keep the worker processes alive between epochs."""
    dataloader_prefetch_factor: int | None = None
    """Batches that each worker loads ahead, at least 1. None: torch's default. Needs `dataloader_num_workers`."""
    dataloader_multiprocessing_context: str | None = None
    """Start method of the workers: "fork", "forkserver" or "spawn". None: the platform's default."""
    train_sampling_strategy: str = "random"
    """Order of the training samples: "random", drawn again for each epoch, or "sequential"."""
    remove_unused_columns: bool = True
    """Drop the columns of a batch that the model's forward does not take."""
    label_names: tuple[str, ...] | list[str] | None = None
    """Keys of the labels in a batch. None: "labels"."""

    # Reproducibility, devices and processes
    seed: int = 42
    """Seed of all random numbers, from 0 to 4294967295; rank r uses seed + r."""
    data_seed: int | None = None
    """Seed of the sample order, from 0 to 4294967295. None: `seed`."""
    full_determinism: bool = False
    """Use only torch's deterministic algorithms, in this process from now on. An operation without one raises."""
    use_cpu: bool = False
    """Train on the CPU even if there are GPUs."""
    disable_tqdm: bool | None = None
    """Log progress as lines instead of a bar. None or False: show a bar in terminals and notebooks."""
    ddp_find_unused_parameters: bool | None = None
    """Option of DistributedDataParallel. None: torch's default."""
    ddp_bucket_cap_mb: int | None = None
    """Bucket size of DistributedDataParallel in MiB, at least 1. None: torch's default."""
    ddp_broadcast_buffers: bool | None = None
    """Option of DistributedDataParallel. None: torch's default."""
    ddp_static_graph: bool | None = None
    """Option of DistributedDataParallel. None: torch's default."""

    do_eval: bool = field(init=False, default=False)
    """Whether `eval_strategy` is not "no". Derived, not an argument."""

    def __post_init__(self) -> None:
        self._check_types()
        self._normalise()
        for name, (is_legal, legal) in RULES.items():
            value = getattr(self, name)
            if not is_legal(value):
                raise self._illegal(name, legal)
        options_of(self.optim, self.optim_args, arguments=type(self).__name__)
        self._derive()
        self._check_combinations()

    def _check_types(self) -> None:
        # The text "false" is true in Python. A value read from a file must not turn a flag on by accident.
        for name, (kinds, legal) in types_of(type(self)).items():
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise self._illegal(name, legal)
        if self.report_to not in ("none", None, [], ()):
            raise UsageError(
                f"{type(self).__name__}.report_to={self.report_to!r}: must be 'none'; pass loggers to the trainer, "
                "such as callbacks=[TBLogger(...)]"
            )

    def _illegal(self, name: str, legal: str) -> UsageError:
        default = next(setting.default for setting in fields(self) if setting.name == name)
        return UsageError(
            f"{type(self).__name__}.{name}={getattr(self, name)!r}: must be {legal}; set {name}={default!r} (the "
            "default) or another legal value"
        )

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
            raise UsageError(f"{name}.fp16=True: excludes bf16=True; set only one of them")
        if self.dataloader_num_workers == 0 and self.dataloader_prefetch_factor is not None:
            raise UsageError(
                f"{name}.dataloader_prefetch_factor={self.dataloader_prefetch_factor}: needs worker processes; set "
                "dataloader_num_workers=1 or more"
            )
        needs_eval = self.save_strategy == "best" or self.lr_scheduler_type == "reduce_lr_on_plateau"
        if needs_eval and self.eval_strategy == "no":
            cause = (
                "save_strategy='best'" if self.save_strategy == "best" else "lr_scheduler_type='reduce_lr_on_plateau'"
            )
            raise UsageError(f"{name}.eval_strategy='no': {cause} needs evaluations; set 'steps' or 'epoch'")
        if self.load_best_model_at_end and self.save_strategy != "best":
            self._check_best()

    def _check_best(self) -> None:
        """Check that every save comes with an evaluation, or nobody knows which checkpoint is the best."""
        name = f"{type(self).__name__}.load_best_model_at_end=True"
        if self.eval_strategy != self.save_strategy:
            raise UsageError(
                f"{name}: save_strategy={self.save_strategy!r} differs from eval_strategy={self.eval_strategy!r}; set "
                "both to the same value, or set save_strategy='best'"
            )
        if self.eval_strategy != "steps":
            return
        every, evaluated = self.save_steps, self.eval_steps or self.logging_steps
        quotient = every / evaluated
        if (every < 1) != (evaluated < 1) or not math.isclose(quotient, round(quotient), rel_tol=1e-6):
            raise UsageError(
                f"{name}: save_steps={every} is not a multiple of eval_steps={evaluated}; set save_steps to a multiple "
                "of eval_steps"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as JSON types. Hugging Face's integrations call this method and the next two."""
        return {setting.name: _as_json(getattr(self, setting.name)) for setting in fields(self)}

    def to_json_string(self) -> str:
        """Return all settings as a JSON document."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return all settings as flags, numbers and text; anything else is converted to text."""
        return {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in self.to_dict().items()
        }

    def digest(self) -> str:
        """Return a hash of the settings that change the run's results, which its paths and names do not.

        Checkpoints carry it as `training_args_hash`, so all checkpoints of a run have the same one.
        """
        settings = {name: value for name, value in self.to_dict().items() if name not in _NOT_IN_DIGEST}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]

    def warmup_steps_of(self, max_steps: int) -> int:
        """Return the number of warmup steps in a run of `max_steps` steps."""
        return int(self.warmup_steps) if self.warmup_steps >= 1 else math.ceil(max_steps * self.warmup_steps)

    @property
    def train_batch_size(self) -> int:
        """Samples in one micro-batch of one rank."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples in one evaluation batch of one rank."""
        return self.per_device_eval_batch_size


@dataclass(frozen=True, kw_only=True)
class DDPTrainingArguments(TrainingArguments):
    """Settings of a `DDPTrainer`: `TrainingArguments` with `dispatch_batches=True`.

    Rank 0 reads the data and sends every rank its batches. With `dispatch_batches=False` every rank reads its own.

    Raises:
        UsageError: as for `TrainingArguments`.

    Example:
        >>> from skyward.training import DDPTrainingArguments
        >>> DDPTrainingArguments("out", max_steps=100).dispatch_batches
        True
    """

    dispatch_batches: bool | None = True
    """Let rank 0 read the data and send every rank its batches."""


def _as_json(value: Any) -> Any:
    """Convert a setting to JSON types; its paths and mappings are of the caller's classes."""
    if isinstance(value, Mapping):
        return {str(name): _as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
