"""Legal values of training arguments, and their names in error messages."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ..errors import UsageError

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "warmup_stable_decay",
)

Rule = tuple[Callable[[Any], bool], str]

CHOICES: dict[str, tuple[str, ...]] = {
    "logging_strategy": ("no", "steps", "epoch"),
    "eval_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch", "best"),
    "save_on_busy": ("wait", "skip"),
    "lr_scheduler_type": SCHEDULES,
    "optim": OPTIMIZERS,
    "train_sampling_strategy": ("random", "sequential"),
    "include_num_input_tokens_seen": ("no", "all", "non_padding"),
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_least(least: float) -> Rule:
    return lambda value: _is_number(value) and value >= least, f"a number >= {least:g}"


def _whole(least: int, *, or_none: bool = False) -> Rule:
    legal = f"a whole number >= {least}" + (", or None" if or_none else "")
    return lambda value: (or_none and value is None) or (_is_whole(value) and value >= least), legal


def _steps(*, or_none: bool = False) -> Rule:
    legal = "a whole number of steps >= 1, or a share of all steps between 0 and 1"
    return lambda value: (or_none and value in (None, 0)) or _is_steps(value), legal + (", or None" * or_none)


def _is_steps(value: object) -> bool:
    return _is_number(value) and (0 < float(str(value)) < 1 or (float(str(value)) >= 1 and float(str(value)) % 1 == 0))


def _share(value: object) -> bool:
    return _is_number(value) and 0 <= float(str(value)) < 1


def _one_of(names: tuple[str, ...]) -> Rule:
    return lambda value: value in names, "one of " + ", ".join(map(repr, names))


RULES: dict[str, Rule] = {
    **{name: _one_of(names) for name, names in CHOICES.items()},
    "num_train_epochs": (lambda value: _is_number(value) and value > 0, "a number > 0"),
    "max_steps": (lambda value: _is_whole(value) and (value == -1 or value > 0), "a whole number >= 1, or -1"),
    "per_device_train_batch_size": _whole(1),
    "per_device_eval_batch_size": _whole(1),
    "gradient_accumulation_steps": _whole(1),
    "learning_rate": _at_least(0),
    "warmup_steps": (
        lambda value: _is_number(value) and (0 <= value < 1 or (value >= 1 and value % 1 == 0)),
        "a whole number of steps >= 0, or a share of all steps below 1",
    ),
    "weight_decay": _at_least(0),
    "adam_beta1": (_share, "a number >= 0 and < 1"),
    "adam_beta2": (_share, "a number >= 0 and < 1"),
    "adam_epsilon": _at_least(0),
    "label_smoothing_factor": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "eval_accumulation_steps": _whole(1, or_none=True),
    "max_grad_norm": _at_least(0),
    "logging_steps": _steps(),
    "eval_steps": _steps(or_none=True),
    "save_steps": _steps(),
    "eval_delay": _at_least(0),
    "save_total_limit": _whole(1, or_none=True),
    "jit_checkpoint_grace_s": (lambda value: _is_number(value) and value > 0, "a number of seconds > 0"),
    "dataloader_num_workers": _whole(0),
    "dataloader_prefetch_factor": _whole(1, or_none=True),
    "ddp_bucket_cap_mb": _whole(1, or_none=True),
    "seed": (lambda value: _is_whole(value) and 0 <= value < 2**32, "a whole number from 0 to 4294967295"),
    "data_seed": (
        lambda value: value is None or (_is_whole(value) and 0 <= value < 2**32),
        "a whole number from 0 to 4294967295, or None",
    ),
}

_PATH: tuple[tuple[type, ...], str] = ((str, os.PathLike, type(None)), "a path, or None")
_OPTIONS: tuple[tuple[type, ...], str] = ((Mapping, type(None)), "a dictionary, or None")
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "output_dir": _PATH,
    "logging_dir": _PATH,
    "run_name": ((str, type(None)), "text, or None"),
    "optim_args": ((str, type(None)), "text such as 'momentum=0.9', or None"),
    "lr_scheduler_kwargs": _OPTIONS,
    "activation_checkpointing_kwargs": _OPTIONS,
    "resume_from_checkpoint": ((str, os.PathLike, bool, type(None)), "a checkpoint's folder, True, 'auto', or None"),
    "report_to": ((str, tuple, list, type(None)), "'none', an empty list, or None"),
    "metric_for_best_model": ((str, type(None)), "a metric's name, or None"),
}


def types_of(arguments: type) -> dict[str, tuple[tuple[type, ...], str]]:
    """Return the legal types of each field, and their name in messages. Flags are known by their annotation."""
    flags = {
        field.name: ((int, type(None)), "True, False or None")
        if "None" in str(field.type)
        else ((int,), "True or False")
        for field in fields(arguments)
        if field.init and field.type in ("bool", "bool | None")
    }
    return flags | _TYPES


_FLAGS = {"nesterov", "centered"}
_TAKEN: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
}
"""Options that have an effect in Hugging Face's Trainer.

It reads `weight_decay` here too, but each group of parameters already has its own, from the argument of that name.
Source: transformers 5.23, trainer_optimizer.py."""


def options_of(optim: str, text: str | None, *, arguments: str) -> dict[str, float | bool]:
    """Parse "name=value, ...", the options of the optimizer `optim`.

    Args:
        optim: name of the optimizer, one of `OPTIMIZERS`.
        text: the options; None: none.
        arguments: name of the class that holds them, for messages.

    Raises:
        UsageError: the optimizer does not take an option, or a value is not a number or flag.
    """
    where = f"{arguments}.optim_args={text!r}"
    options: dict[str, float | bool] = {}
    for part in filter(None, (text or "").replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        taken = _TAKEN.get(optim, ())
        if name not in taken:
            takes = ", ".join(taken) or "none"
            raise UsageError(
                f"{where}: optim={optim!r} has no option {name!r} (options: {takes}); remove it, or set learning_rate, "
                "weight_decay and adam_* as arguments of their own"
            )
        options[name] = _flag(value, where, name) if name in _FLAGS else _number(value, where, name)
    if options.get("nesterov") and (not options.get("momentum") or options.get("dampening")):
        raise UsageError(f"{where}: nesterov needs momentum and excludes dampening; set momentum > 0 and dampening=0")
    return options


def _number(value: str, where: str, name: str) -> float:
    try:
        number = float(value)
    except ValueError:  # rejected below
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise UsageError(f"{where}: {name}={value} must be a number >= 0; set a number, such as {name}=0.9")
    return number


def _flag(value: str, where: str, name: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if value.lower() not in known:
        raise UsageError(f"{where}: {name}={value} must be a flag; set {name} to one of {', '.join(known)}")
    return known[value.lower()]
