"""Test whether a run may resume from a checkpoint: its last loss and its weights must be finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..parts import local_of


def is_finite(model: Any, loss: Any = None) -> torch.Tensor | bool:
    """Return whether this rank's part of the trainable weights, and the last loss if there is one, are finite.

    The answer is a tensor on the weights' device, so that only a caller who reads it waits for the device. It costs one
    pass over the weights.
    """
    give = getattr(model, "parameters", None)
    parameters = give() if callable(give) else ()
    weights = [local_of(parameter.detach()) for parameter in parameters if parameter.requires_grad]
    full = [weight for weight in weights if weight.dtype in (torch.float32, torch.float64)]
    half = [weight for weight in weights if weight.dtype in (torch.float16, torch.bfloat16)]
    # A norm is not finite if any element is not. Of all ways to test this, it is by far the fastest on a CPU.
    norms = [
        *(torch._foreach_norm(full) if full else ()),
        *(torch._foreach_norm(half, 2, torch.float32) if half else ()),
    ]
    if loss is not None:
        norms.append(torch.as_tensor(loss).detach())
    if not norms:
        return True
    device = norms[0].device
    return torch.stack([torch.isfinite(norm).all().to(device) for norm in norms]).all()


def losses_are_finite(metrics: Mapping[str, Any]) -> bool | None:
    """Return whether all metrics with "loss" in their names are finite; None if there is none."""
    losses = [value for name, value in metrics.items() if "loss" in name.lower() and not isinstance(value, str | bytes)]
    try:
        return all(math.isfinite(float(loss)) for loss in losses) if losses else None
    except (TypeError, ValueError):  # a metric that is not a number leaves it unknown
        return None
