"""Optimizers and learning rate schedules by their names in the arguments. Only torch is imported."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from ...errors import UsageError
from ..arguments import TrainingArguments
from ..legal_arguments import options_of

Scheduler = LRScheduler | ReduceLROnPlateau
Factor = Callable[[int], float]

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters without weight decay. Source: Hugging Face's Trainer.get_decay_parameter_names."""


def make_optimizer(model: nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    """Make the optimizer of two groups: parameters with weight decay, and those without (biases, norms).

    Raises:
        UsageError: no parameter requires a gradient, or an option does not exist.
    """
    norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
        for parameter in module.parameters(recurse=False)
    }
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_decayed = id(parameter) not in norms and not _NOT_DECAYED.search(name.lower())
            (decayed if is_decayed else others).append(parameter)
    if not decayed and not others:
        raise UsageError(
            f"model={type(model).__name__}: no parameter requires a gradient; call requires_grad_() on what to train"
        )
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if args.optim in ("adamw_torch", "adamw_torch_fused"):
        return torch.optim.AdamW(
            groups,
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            fused=True if args.optim == "adamw_torch_fused" else None,
        )
    options = options_of(args.optim, args.optim_args, arguments=type(args).__name__)
    classes: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
    }
    return classes[args.optim](groups, lr=args.learning_rate, **options)


def make_scheduler(optimizer: torch.optim.Optimizer, args: TrainingArguments, max_steps: int) -> Scheduler:
    """Make the schedule over `max_steps` steps.

    Raises:
        UsageError: the schedule does not take the `lr_scheduler_kwargs`.
    """
    options = dict(args.lr_scheduler_kwargs or {})
    if args.lr_scheduler_type == "reduce_lr_on_plateau":
        return ReduceLROnPlateau(optimizer, **options)
    make = _SCHEDULES[args.lr_scheduler_type]
    try:
        factor = make(args.warmup_steps_of(max_steps), max_steps, optimizer.defaults["lr"], **options)
    except TypeError as error:
        raise UsageError(
            f"TrainingArguments.lr_scheduler_kwargs={options!r}: does not fit {args.lr_scheduler_type!r} ({error}); "
            "set options that this schedule takes"
        ) from error
    return LambdaLR(optimizer, factor)


def learning_rate_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of the first parameter group."""
    return float(optimizer.param_groups[0]["lr"])


def _constant(warmup: int, steps: int, rate: float) -> Factor:
    return lambda step: 1.0


def _constant_with_warmup(warmup: int, steps: int, rate: float) -> Factor:
    return _after(warmup, lambda step: 1.0)


def _linear(warmup: int, steps: int, rate: float) -> Factor:
    return _after(warmup, lambda step: max(0.0, (steps - step) / max(1, steps - warmup)))


def _cosine(warmup: int, steps: int, rate: float, *, num_cycles: float = 0.5) -> Factor:
    return _after(warmup, lambda step: max(0.0, _wave(_progress(step, warmup, steps), num_cycles)))


def _cosine_with_restarts(warmup: int, steps: int, rate: float, *, num_cycles: int = 1) -> Factor:
    def fall(step: int) -> float:
        done = _progress(step, warmup, steps)
        return 0.0 if done >= 1 else max(0.0, _wave(num_cycles * done % 1.0, 0.5))

    return _after(warmup, fall)


def _cosine_with_min_lr(
    warmup: int,
    steps: int,
    rate: float,
    *,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Factor:
    if (min_lr is None) == (min_lr_rate is None):
        raise TypeError(f"min_lr={min_lr}, min_lr_rate={min_lr_rate}: not exactly one of them; set one of the two")
    least = min_lr_rate if min_lr is None else min_lr / rate
    assert least is not None
    return _after(
        warmup, lambda step: max(0.0, _wave(_progress(step, warmup, steps), num_cycles) * (1 - least) + least)
    )


def _polynomial(warmup: int, steps: int, rate: float, *, lr_end: float = 1e-7, power: float = 1.0) -> Factor:
    if rate <= lr_end:
        raise TypeError(f"lr_end={lr_end}: not below learning_rate={rate}; lower it")

    def fall(step: int) -> float:
        left = max(0.0, 1 - _progress(step, warmup, steps))
        return float(((rate - lr_end) * left**power + lr_end) / rate)

    return _after(warmup, fall)


def _inverse_sqrt(warmup: int, steps: int, rate: float, *, timescale: int | None = None) -> Factor:
    scale = timescale or warmup or 10_000
    return _after(warmup, lambda step: 1.0 / math.sqrt((step + scale - warmup) / scale))


def _warmup_stable_decay(
    warmup: int,
    steps: int,
    rate: float,
    *,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Factor:
    stable = steps - warmup - num_decay_steps if num_stable_steps is None else num_stable_steps
    shapes: dict[str, Callable[[float], float]] = {
        "linear": lambda left: left,
        "cosine": lambda left: _wave(1 - left, num_cycles),
        "1-sqrt": lambda left: 1 - math.sqrt(1 - left),
    }
    if warmup_type not in shapes or decay_type not in shapes:
        names = ", ".join(shapes)
        raise TypeError(f"warmup_type={warmup_type!r}, decay_type={decay_type!r}: unknown; use {names}")

    def factor(step: int) -> float:
        if step < warmup:
            share = shapes[warmup_type](step / max(1, warmup))
        elif step < warmup + stable:
            return 1.0
        elif step < warmup + stable + num_decay_steps:
            share = shapes[decay_type](1 - (step - warmup - stable) / max(1, num_decay_steps))
        else:
            return min_lr_ratio
        return max(0.0, share * (1 - min_lr_ratio) + min_lr_ratio)

    return factor


_SCHEDULES: dict[str, Callable[..., Factor]] = {
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
    "warmup_stable_decay": _warmup_stable_decay,
}


def _after(warmup: int, then: Factor) -> Factor:
    """Return a linear rise from 0 over `warmup` steps, followed by `then`."""
    return lambda step: step / max(1, warmup) if step < warmup else then(step)


def _progress(step: int, warmup: int, steps: int) -> float:
    return (step - warmup) / max(1, steps - warmup)


def _wave(progress: float, cycles: float) -> float:
    return 0.5 * (1.0 + math.cos(2.0 * math.pi * cycles * progress))
