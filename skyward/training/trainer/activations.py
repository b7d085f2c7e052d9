"""Activations that are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...errors import UsageError
from ..arguments import TrainingArguments

__all__ = ["checkpoint_activations"]


def checkpoint_activations(model: nn.Module, args: TrainingArguments) -> None:
    """Has the model do so where the arguments say it: it alone knows its layers.

    Raises: UsageError for a model that cannot.
    """
    if not args.activation_checkpointing:
        return
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        enable = getattr(model, f"{name}_enable", None)
        if enable is None:
            continue
        given = dict(args.activation_checkpointing_kwargs or {})
        options: dict[str, Any] = {each: given.pop(each) for each in ("every_n_layers", "offload") if each in given}
        enable(**options, **({f"{name}_kwargs": given} if given else {}))
        return
    raise UsageError(
        f"{type(args).__name__}.activation_checkpointing=True: {type(model).__name__} has neither "
        "activation_checkpointing_enable nor gradient_checkpointing_enable; define one, or call "
        "torch.utils.checkpoint.checkpoint in its forward"
    )
