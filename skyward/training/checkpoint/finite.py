"""Whether a checkpoint is worth going on from: its last loss and its weights are numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..parts import local_of

__all__ = ["is_finite", "losses_are_finite"]


def is_finite(model: Any, loss: Any = None) -> torch.Tensor | bool:
    """Whether this rank's part of the weights that are trained, and the last loss if there was one, are finite.

    The answer is a tensor where the weights are, so that nobody waits for the device who does not ask for it. It costs
    one pass over the weights.
    """
    give = getattr(model, "parameters", None)
    parameters = give() if callable(give) else ()
    weights = [local_of(parameter.detach()) for parameter in parameters if parameter.requires_grad]
    full = [weight for weight in weights if weight.dtype in (torch.float32, torch.float64)]
    half = [weight for weight in weights if weight.dtype in (torch.float16, torch.bfloat16)]
    # A norm is not finite where an element is not. Of all ways to ask, this takes the least time on a CPU by far.
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
    """What metrics say: those with "loss" in their names. None where there is none."""
    losses = [value for name, value in metrics.items() if "loss" in name.lower() and not isinstance(value, str | bytes)]
    try:
        return all(math.isfinite(float(loss)) for loss in losses) if losses else None
    except (TypeError, ValueError):  # a metric that is no number: nothing is known
        return None
