"""Numerics: deterministic algorithms, mixed precision, and gradients between backward and zero_grad."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

import torch

from ..arguments import TrainingArguments
from .world import full

__all__ = ["Precision", "make_deterministic"]

_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "ASCEND_LAUNCH_BLOCKING": "1",
    "HCCL_DETERMINISTIC": "1",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}
"""Of libraries for devices. Source: transformers 5.23, enable_full_determinism."""


class Precision:
    """Autocast to bf16 or fp16, the latter with a scaled loss. Stateful: its state is the scaler's, empty without."""

    def __init__(self, args: TrainingArguments, device: torch.device) -> None:
        self._device = device
        self._dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        self._scaler: torch.amp.GradScaler | None = None
        self.restart()

    def restart(self) -> None:
        """Begin a training: with the scale that a scaler begins with."""
        self._scaler = torch.amp.GradScaler(self._device.type) if self._dtype is torch.float16 else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Around forward and loss, in evaluation too."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def clip(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        """Scales the gradients down to max_norm (0: not). Gives their norm before: (), on the device, no sync."""
        self.unscale(optimizer)
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        if max_norm > 0:
            return full(torch.nn.utils.clip_grad_norm_(trained, max_norm))
        return full(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients become those of the loss itself. Once for each step."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """The optimizer's step. Gives whether it was made: fp16 leaves out one whose gradients overflowed."""
        if self._scaler is None:
            optimizer.step()
            return True
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        return self._scaler.get_scale() >= before

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        if self._scaler is not None and state_dict:
            self._scaler.load_state_dict(state_dict)


def make_deterministic(args: TrainingArguments) -> None:
    """With `full_determinism` torch uses deterministic algorithms only, in this process and from now on; where it has
    none it raises a RuntimeError that names the operation. Before a device is used: libraries look once.
    """
    if args.full_determinism:
        os.environ.update(_SETTINGS)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
